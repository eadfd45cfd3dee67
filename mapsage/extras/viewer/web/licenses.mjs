// Writes LICENSES.txt: the license of every package whose code is in viewer.js.
import {build} from 'esbuild';
import {readdirSync, readFileSync, writeFileSync} from 'node:fs';
import {join} from 'node:path';

const {metafile} = await build({
  entryPoints: ['src/main.js'], bundle: true, write: false, metafile: true, format: 'iife'});
const packages = new Set();
for (const file of Object.keys(metafile.inputs)) {
  const inside = file.lastIndexOf('node_modules/');
  if (inside >= 0) {
    const parts = file.slice(inside + 'node_modules/'.length).split('/');
    const name = parts[0].startsWith('@') ? `${parts[0]}/${parts[1]}` : parts[0];
    packages.add(file.slice(0, inside) + 'node_modules/' + name);
  }
}
const texts = [...packages].sort().map((folder) => {
  const about = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'));
  const files = readdirSync(folder).filter((name) => /^(licen[cs]e|copying|notice)/i.test(name));
  const text = files.map((name) => readFileSync(join(folder, name), 'utf8').trim()).join('\n\n');
  return `${about.name} ${about.version} (${about.license})\n\n${text || 'No license text in the package.'}`;
});
const line = '-'.repeat(80);
writeFileSync('LICENSES.txt', `Code of these packages is in viewer.js.\n\n${line}\n${texts.join(`\n\n${line}\n`)}\n`);
