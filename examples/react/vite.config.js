// Files of the audio thread stay files: as text in the bundle, a strict policy would not let them run.
export default { build: { assetsInlineLimit: 0 } };
