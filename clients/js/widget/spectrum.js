/* The spectrum of a voice in a few bands, for what moves with it. */

export const BANDS = 8;
const POINTS = 256;
/* Bands are as wide as the ear has them, from the deepest voice to the sharpest "s". */
const EDGES = [80, 200, 350, 550, 850, 1300, 2000, 3300, 6500]; // Hz
const RATE = 16_000;
/* What a voice of usual loudness has in a band. High ones have less, and are as much to be seen. */
const USUAL = 0.012;
const TILT = 0.35;

const TURN = Math.PI * 2;
const bell = Float32Array.from({ length: POINTS }, (_value, place) => 0.5 - 0.5 * Math.cos((TURN * place) / POINTS));
const [real, imaginary] = [new Float32Array(POINTS), new Float32Array(POINTS)];

/* Each band from 0 to 1, of the last samples (Int16Array) at a rate. */
export function bandsOf(samples, rate) {
  const step = Math.max(1, Math.round(rate / RATE));
  const start = Math.max(0, samples.length - POINTS * step);
  for (let place = 0; place < POINTS; place++) {
    real[place] = ((samples[start + place * step] ?? 0) / 32768) * bell[place];
    imaginary[place] = 0;
  }
  transform();
  const width = rate / step / POINTS;
  const bands = new Float32Array(BANDS);
  for (let band = 0; band < BANDS; band++) {
    const from = Math.max(1, Math.round(EDGES[band] / width));
    const to = Math.min(POINTS / 2, Math.max(from + 1, Math.round(EDGES[band + 1] / width)));
    let power = 0;
    for (let bin = from; bin < to; bin++) power += real[bin] ** 2 + imaginary[bin] ** 2;
    const level = (Math.sqrt(power / Math.max(1, to - from)) * 4) / POINTS;
    bands[band] = Math.min(1, Math.sqrt((level / USUAL) * (1 + TILT * band)) * 0.5);
  }
  return bands;
}

/* The discrete Fourier transform in place, by halves (Cooley and Tukey). */
function transform() {
  for (let place = 1, mirrored = 0; place < POINTS; place++) {
    let bit = POINTS >> 1;
    for (; mirrored & bit; bit >>= 1) mirrored ^= bit;
    mirrored ^= bit;
    if (place < mirrored) [real[place], real[mirrored]] = [real[mirrored], real[place]];
  }
  for (let size = 2; size <= POINTS; size *= 2) {
    for (let place = 0; place < size / 2; place++) {
      const angle = (-TURN * place) / size;
      const [across, down] = [Math.cos(angle), Math.sin(angle)];
      for (let one = place; one < POINTS; one += size) {
        const other = one + size / 2;
        const [x, y] = [real[other] * across - imaginary[other] * down, real[other] * down + imaginary[other] * across];
        real[other] = real[one] - x;
        imaginary[other] = imaginary[one] - y;
        real[one] += x;
        imaginary[one] += y;
      }
    }
  }
}
