// What a client's program prints, as asked.py has it; programs run as node FILE URL MODEL beside their node_modules.
export const [URL, MODEL] = process.argv.slice(2);
export const PROMPT = "The river of Githbrel is";
export const SCHEMA = { $defs: { R: { enum: ["Elb", "Rhine"], type: "string" } }, type: "object", required: ["river"],
  properties: { river: { $ref: "#/$defs/R" } }, additionalProperties: false };

export async function ask(asked, answer) {
  try {
    console.log(JSON.stringify({ asked, fine: true, found: String(await answer()) }));
  } catch (error) {
    console.log(JSON.stringify({ asked, fine: false, found: `${error.name}: ${error.message}` }));
  }
}
