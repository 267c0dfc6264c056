import { useVoiceChat } from "omni-ws/react";

export function App() {
  const { state, transcript, error, talking, muted, start, stop, mute, send } = useVoiceChat({
    url: "ws://127.0.0.1:8080/v1/streaming_input",
    instructions: "Answer in one sentence.",
  });
  const write = (event: React.FormEvent<HTMLFormElement>) => {
    event.preventDefault();
    send(String(new FormData(event.currentTarget).get("text")));
    event.currentTarget.reset();
  };
  return (
    <main>
      <h1>Talk to us</h1>
      <p role="status">{error ? error.message || error.code : state}</p>
      {transcript.map(({ id, who, text, interim, spoken }) => (
        <p key={id}>
          {who === "you" ? "You: " : "Answer: "}
          {spoken ? text.slice(0, spoken[0]) : text}
          {spoken && <mark>{text.slice(...spoken)}</mark>}
          {spoken && text.slice(spoken[1])} <i>{interim}</i>
        </p>
      ))}
      <button onClick={talking ? stop : start}>{talking ? "Stop" : "Talk"}</button>
      <button onClick={() => mute()} aria-pressed={muted} disabled={!talking}>Mute</button>
      <form onSubmit={write}><input name="text" aria-label="Write" required /></form>
    </main>
  );
}
