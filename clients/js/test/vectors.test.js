/* The golden vectors of the protocol. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { decodeOutput, encodeInput, parseFrame } from "../client.js";

const FOLDER = new URL("../../../protocol/vectors/", import.meta.url);
const vectors = (name) => readFileSync(new URL(`${name}.jsonl`, FOLDER), "utf8").trim().split("\n").map((line) => JSON.parse(line));
const bytes = (hex) => new Uint8Array(Buffer.from(hex, "hex"));
const hex = (array) => Buffer.from(array).toString("hex");

test("binary frames of the server are read, and bad ones refused", () => {
  const given = vectors("binary_frames").filter(({ direction }) => direction === "output");
  for (const { name, hex: frame, expect } of given) {
    const read = () => decodeOutput(bytes(frame).buffer);
    if (expect.error) {
      assert.throws(read, { code: expect.error }, name);
      continue;
    }
    const { sequenceId, modality, startMs, payload } = read();
    const found = { sequence_id: sequenceId, modality, start_ms: startMs, payload_hex: hex(payload) };
    for (const [field, value] of Object.entries(found)) if (field in expect) assert.equal(value, expect[field], `${name}: ${field}`);
  }
  assert.ok(given.length > 2);
});

test("binary frames are written as the protocol has them", () => {
  const wanted = ({ direction, expect, canonical }) =>
    direction === "input" && expect.payload_hex !== undefined && canonical !== false;
  const given = vectors("binary_frames").filter(wanted);
  for (const { name, hex: frame, expect } of given) {
    const chunk = {
      sequenceId: expect.sequence_id,
      modality: expect.modality,
      payload: bytes(expect.payload_hex),
      endOfInput: expect.end_of_input,
      timestampMs: expect.timestamp_ms,
    };
    assert.equal(hex(encodeInput(chunk)), frame, name);
  }
  assert.ok(given.length > 2);
});

test("text frames of the server are read", () => {
  const given = vectors("server_frames");
  for (const { frame } of given) assert.equal(parseFrame(frame).type, JSON.parse(frame).type);
  assert.ok(given.length > 5);
});
