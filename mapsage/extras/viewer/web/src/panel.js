// The settings beside the map, made of plain elements.

export const KEYS = [
  ['1 … 9', 'class on or off'], ['a', 'all classes, or none'], ['m t d', 'map, truth, disagreement'],
  ['[ ]', 'move the border'], ['s', 'scene alone, map alone, both'], ['p', 'polygons'],
  ['n N', 'next map, map before'], ['f', 'whole map'], ['+ −', 'zoom'],
];

const LABEL_KEYS = [
  ['click', 'a point of the chosen class'], ['1 … 9', 'choose a class'], ['z', 'undo'], ['u', 'go where the map is least sure'],
  ['m i', 'map, where it is unsure'], ['[ ]', 'move the border'], ['s', 'picture alone, map alone, both'], ['n N', 'next, before'],
  ['f', 'whole map'], ['+ −', 'zoom'],
];

export function element(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function percent(share) {
  return share > 0 && share < 0.001 ? '< 0.1 %' : `${(100 * share).toFixed(1)} %`;
}

function choice(kind, settings, change) {
  const input = element('input', {type: 'radio', name: 'kind', value: kind, checked: settings.kind === kind});
  input.addEventListener('change', () => change({kind}));
  return element('label', {className: 'row'}, [input, ` ${kind}`]);
}

function slider(id, label, value, text, changed) {
  const input = element('input', {type: 'range', min: 0, max: 100, value, id, ariaLabel: label});
  const shown = element('p', {textContent: text(value)});
  input.addEventListener('input', () => {
    shown.textContent = text(input.value);
    changed(Number(input.value));
  });
  return [input, shown];
}

function classRow(each, iou, settings, toggle) {
  const input = element('input', {type: 'checkbox', checked: settings.on.has(each.value)});
  input.dataset.value = each.value;
  input.addEventListener('change', () => toggle(each.value));
  const swatch = element('span', {className: 'swatch'});
  swatch.style.background = `rgb(${each.color.join(',')})`;
  return element('label', {className: 'class', title: each.name}, [
    input, swatch, element('span', {className: 'name', textContent: each.name}),
    element('span', {className: 'share', textContent: each.share === null ? '' : percent(each.share)}),
    ...(typeof iou === 'number' ? [element('span', {className: 'iou', textContent: `IoU ${(100 * iou).toFixed(1)}`})] : [])]);
}

function about(entry) {
  const size = `${entry.width.toLocaleString('en')} × ${entry.height.toLocaleString('en')} pixels`;
  const ground = entry.pixel_meters ? `, ${entry.pixel_meters.toPrecision(3)} m` : '';
  return `${size}${ground}, ${entry.crs || 'no CRS: coordinates are those of the file'}`;
}

// `change` takes the settings that are new, `choose` the number of a map.
export function drawPanel(root, catalog, number, settings, {change, toggle, choose}) {
  const entry = catalog.maps[number];
  const parts = [];
  if (catalog.maps.length > 1) {
    const list = element('select', {ariaLabel: 'map'}, catalog.maps.map((each, index) =>
      element('option', {value: index, textContent: each.name, selected: index === number})));
    list.addEventListener('change', () => choose(Number(list.value)));
    parts.push(list);
  }
  parts.push(element('h1', {textContent: entry.name}), element('p', {textContent: about(entry)}));
  for (const note of entry.notes) {
    parts.push(element('p', {className: 'note', textContent: note}));
  }
  if (entry.doing) {
    parts.push(element('p', {className: 'note', textContent: entry.doing}));
  }
  if (entry.files.truth) {
    const [right, labeled] = entry.accuracy;
    parts.push(element('h2', {textContent: 'shown'}),
      ...['map', 'truth', 'disagreement'].map((kind) => choice(kind, settings, change)),
      element('p', {textContent: `${percent(right / labeled)} of ${labeled.toLocaleString('en')} labeled pixels are right`}));
  }
  if (catalog.labels) {
    parts.push(element('h2', {textContent: 'shown'}), ...['map', 'unsure'].map((kind) => choice(kind, settings, change)));
  }
  parts.push(element('h2', {textContent: 'classes'}),
    ...entry.classes.map((each, index) => classRow(each, entry.iou?.[index], settings, toggle)));
  if (entry.files.scene || catalog.labels) {
    parts.push(element('h2', {textContent: 'opacity'}), ...slider('opacity', 'opacity of the map in percent',
      settings.opacity, (value) => `${value} %`, (opacity) => change({opacity}, false)));
  }
  if (entry.files.confidence || catalog.labels) {
    parts.push(element('h2', {textContent: 'confidence'}), ...slider('least', 'least confidence in percent',
      settings.least, (value) => `${value} % or more`, (least) => change({least}, false)));
  }
  if (entry.polygons) {
    const input = element('input', {type: 'checkbox', id: 'polygons', checked: settings.polygons});
    input.addEventListener('change', () => change({polygons: input.checked}));
    parts.push(element('h2', {textContent: 'polygons'}),
      element('label', {className: 'row'}, [input, ' polygons of the view']));
  }
  const keys = element('dl', {className: 'keys'});
  for (const [key, meaning] of catalog.labels ? LABEL_KEYS : KEYS) {
    keys.append(element('dt', {textContent: key}), element('dd', {textContent: meaning}));
  }
  parts.push(element('h2', {textContent: 'keys'}), keys,
    element('p', {}, [element('a', {href: 'LICENSES.txt', textContent: 'licenses of this page'})]));
  root.replaceChildren(...parts);
}
