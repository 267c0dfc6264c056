/* What a model may ask of the page: tools that it can call in a conversation. A new one is an entry here. */

export const TOOLS = {
  local_time: {
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
