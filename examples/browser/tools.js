/* What a model may ask of the page: tools that it can call in a conversation. A new one is an entry in TOOLS and a function
   in RUN. */

export const TOOLS = [
  {
    type: "function",
    function: {
      name: "local_time",
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
    },
  },
];

const RUN = {
  local_time({ time_zone: timeZone }) {
    const format = new Intl.DateTimeFormat("en", { dateStyle: "full", timeStyle: "short", timeZone: timeZone || undefined });
    return `${format.format()} (${format.resolvedOptions().timeZone})`;
  },
};

/* The result of a call, for the model. What is wrong with a call is a result, too: the model can try again or say so. */
export function runTool({ name, arguments: given }) {
  if (!Object.hasOwn(RUN, name)) return `There is no tool ${name}.`;
  try {
    return RUN[name](JSON.parse(given || "{}") ?? {});
  } catch (error) {
    return `This did not work: ${error.message}`;
  }
}
