/* What a model may ask of the page: tools that it can call in a conversation. A new one is an entry here; `label` is what
   its switch in the settings says. */

export const TOOLS = {
  local_time: {
    label: "Look at the clock",
    description: "The date and time now, where the user is or in another time zone.",
    parameters: {
      type: "object",
      properties: {
        time_zone: {
          type: "string",
          description: "IANA name of a time zone, such as Asia/Tokyo; left out, it is the user's own.",
        },
      },
    },
    run({ time_zone: timeZone }) {
      const format = new Intl.DateTimeFormat("en", { dateStyle: "full", timeStyle: "short", timeZone: timeZone || undefined });
      return `${format.format()} (${format.resolvedOptions().timeZone})`;
    },
  },
};

/* The setting that switches a tool on or off. */
export function settingOf(name) {
  return `tool_${name}`;
}

/* The tools that are switched on. */
export function chosenTools(settings) {
  return Object.fromEntries(Object.entries(TOOLS).filter(([name]) => settings[settingOf(name)]));
}
