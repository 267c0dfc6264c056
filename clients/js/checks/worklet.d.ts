/* What the audio thread has and the compiler's libraries lack (AudioWorkletGlobalScope of the Web Audio API). */

declare const sampleRate: number;
declare const currentTime: number;

interface AudioWorkletProcessor {
  readonly port: MessagePort;
}
declare var AudioWorkletProcessor: new () => AudioWorkletProcessor;

interface Processing extends AudioWorkletProcessor {
  process(inputs: Float32Array[][], outputs: Float32Array[][]): boolean;
}
declare function registerProcessor(name: string, processor: new () => Processing): void;
