// The page of tools/view.py: a scene and its class map under a swipe.

import Map from 'ol/Map.js';
import View from 'ol/View.js';
import ScaleLine from 'ol/control/ScaleLine.js';
import Zoom from 'ol/control/Zoom.js';
import {getCenter} from 'ol/extent.js';
import {defaults} from 'ol/interaction/defaults.js';
import DoubleClickZoom from 'ol/interaction/DoubleClickZoom.js';
import {checkParts, readCatalog, readPolygons} from './files.js';
import {classLayer, classStyle, polygonLayer, projectionOf, sceneLayer} from './layers.js';
import {Labels, labelLayer, pixelView} from './labels.js';
import {drawPanel} from './panel.js';
import {Review} from './review.js';
import {say, sayError} from './sentence.js';
import {Swipe} from './swipe.js';

const WAIT = 1000; // milliseconds between two looks at what is still prepared
const NO_DATA = 255;
const SIDES = ['both', 'scene', 'map'];
const LINKED = ['map', 'at', 'resolution']; // what the address says of the view

const state = {
  catalog: null, number: 0, settings: null, layers: {}, band: {}, side: 'both', projections: [], errors: [],
  turn: 0, // of the calls of show(), the latest
  crowded: false, // whether the sentence is that of too many polygons
};
let map;
let swipe;
let review = null; // where the server takes decisions
let labels = null; // where it shows what can be labeled, in place of maps

const entry = () => state.catalog.maps[state.number];

function hasWebGL() {
  const canvas = document.createElement('canvas');
  return Boolean(canvas.getContext('webgl2') || canvas.getContext('webgl'));
}

async function start() {
  if (location.protocol === 'file:') {
    return; // index.html has said why
  }
  if (!hasWebGL()) {
    throw new Error('This browser has no WebGL, by which the maps are drawn. Switch on hardware ' +
      'acceleration in its settings, or open the maps in QGIS: their styles lie beside them.');
  }
  // By default the wheel does nothing until the map has the focus.
  map = new Map({target: 'map', controls: [new Zoom(), new ScaleLine()], interactions: defaults()});
  swipe = new Swipe(document.getElementById('handle'), map, () => map.render());
  map.on('click', (event) => (labels ? labels.click(event.coordinate) : describe(event)));
  map.on('pointermove', (event) => event.dragging || describe(event));
  map.on('moveend', () => {
    writeLink();
    loadPolygons();
  });
  window.addEventListener('hashchange', () => followLink());
  document.addEventListener('keydown', press);
  state.catalog = await readCatalog();
  if (state.catalog.review) {
    review = new Review({
      map: () => map, number: () => state.number, show, draw, names: () => state.catalog.maps.map((each) => each.name),
      shown: () => (state.layers.classes ? state.number : null),
      border: () => swipe.share, setBorder: (share) => swipe.set(share),
    });
  }
  if (state.catalog.labels) {
    labels = new Labels({
      map: () => map, number: () => state.number, entries: () => state.catalog.maps, draw, redraw: redrawLabels,
    }, state.catalog.labels);
    swipe.set(0); // a border would catch clicks
    // Two clicks beside each other are two labels.
    map.getInteractions().getArray().filter((each) => each instanceof DoubleClickZoom)
      .forEach((each) => map.removeInteraction(each));
  }
  const link = readLink(); // before a view is shown, which the address then has
  await show(linkedMap(link) ?? 0);
  follow(link);
  watch();
}

// The view as the address has it, so that it can be sent and kept: #map=NAME&at=X,Y&resolution=R.
function readLink() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

function linkedMap({map: name}) {
  const number = state.catalog.maps.findIndex((each) => each.name === name);
  return number < 0 ? undefined : number;
}

function writeLink() {
  const view = map.getView();
  if (!state.layers.classes || !view.getCenter()) {
    return;
  }
  const link = new URLSearchParams(location.hash.slice(1)); // what others have there stays
  const digits = entry().geographic ? 7 : 2;
  const values = [entry().name, view.getCenter().map((each) => each.toFixed(digits)).join(','),
    view.getResolution().toPrecision(5)];
  LINKED.forEach((key, at) => link.set(key, values[at]));
  history.replaceState(null, '', `#${link}`);
}

function follow({map: name, at, resolution}) {
  const center = (at || '').split(',').map(Number);
  if (name !== entry().name || center.length !== 2 || !center.every(Number.isFinite) || !(resolution > 0)) {
    return;
  }
  map.getView().setCenter(center);
  map.getView().setResolution(Number(resolution));
}

async function followLink() {
  const link = readLink();
  const number = linkedMap(link);
  if (number !== undefined && number !== state.number) {
    await show(number);
  }
  follow(link);
}

// While copies for the browser are made, the page looks for them and takes them in.
async function watch() {
  while (state.catalog.maps.some((each) => !each.ready)) {
    await new Promise((done) => setTimeout(done, WAIT));
    const catalog = await readCatalog();
    const [before, now] = [entry(), catalog.maps[state.number]];
    state.catalog = catalog;
    if (Object.keys(before.files).join() !== Object.keys(now.files).join()) {
      await show(state.number, state.layers.classes ? map.getView() : null);
    } else if (JSON.stringify(before) !== JSON.stringify(now)) {
      draw();
    }
  }
}

// Show a map, with the settings of the one before where they fit, and its place if it is the same.
// A later call takes over from one that still waits for its files.
async function show(number, view = null) {
  const turn = ++state.turn;
  say('');
  try {
    await load(number, view, turn);
  } catch (error) {
    if (turn === state.turn) {
      fail(error);
    }
  }
}

async function load(number, view, turn) {
  const before = view ? state.settings : {kind: 'map', least: 0, opacity: state.settings?.opacity ?? (labels ? 70 : 100),
    polygons: state.settings?.polygons || false};
  state.number = number;
  state.settings = {...before, on: before.on || new Set(entry().classes.map((each) => each.value))};
  if (!entry().files.truth && !labels) {
    state.settings.kind = 'map';
  }
  if (!entry().polygons) {
    state.settings.polygons = false;
  }
  state.layers = {};
  labels && map.removeLayer(labels.layer); // which outlives the layers of a map
  map.getLayers().getArray().slice().forEach((each) => {
    map.removeLayer(each);
    each.dispose();
  });
  draw();
  if (!labels) {
    await checkParts(entry().files.map);
  }
  if (turn !== state.turn) {
    return;
  }
  state.projections[number] ??= projectionOf(entry(), number);
  const projection = state.projections[number];
  const {layer, band} = labels ? newLabelLayer(projection) : classLayer(entry(), projection);
  const layers = {classes: layer, polygons: polygonLayer(entry())};
  if (labels) {
    layers.scene = labelLayer(entry(), number, 'picture', 0, projection);
  } else if (entry().files.scene) {
    layers.scene = sceneLayer(entry(), projection);
  }
  const shown = ['scene', 'classes', 'polygons'].filter((kind) => layers[kind]).map((kind) => layers[kind]);
  shown.filter((each) => each.getSource().getView).forEach((each) => watchSource(each.getSource()));
  const place = view ? null : labels ? pixelView(entry()) : await layer.getSource().getView();
  if (turn !== state.turn) {
    shown.forEach((each) => each.dispose());
    return;
  }
  state.band = band;
  state.layers = layers;
  if (place) { // before the layers: the place of the map before is in other coordinates
    fit(projection, place);
  }
  shown.forEach((each) => map.addLayer(each));
  if (labels) {
    map.addLayer(labels.layer);
    labels.drawPoints();
  }
  document.querySelectorAll('.ol-scale-line').forEach((each) => { each.hidden = !entry().pixel_meters; });
  draw();
  map.once('rendercomplete', () => { document.body.dataset.ready = entry().name; });
}

function newLabelLayer(projection) {
  const layer = labelLayer(entry(), state.number, 'classes', labels.state.version, projection);
  return {layer, band: {map: 1, confidence: 2}};
}

// Show the map of new labels. The map before stays until the new one is there.
function redrawLabels() {
  const before = state.layers.classes;
  const {layer} = newLabelLayer(state.projections[state.number]);
  state.layers.classes = layer;
  state.settings.on = new Set(entry().classes.map((each) => each.value));
  watchSource(layer.getSource());
  map.getLayers().insertAt(1, layer);
  map.once('rendercomplete', () => {
    map.removeLayer(before);
    before.dispose();
    document.body.dataset.version = labels.state.version;
  });
}

function watchSource(source) {
  source.on('change', () => {
    if (source.getState() === 'error') {
      explain(`A file of ${entry().name} cannot be read: ${source.getError()?.message || 'unknown error'}`);
    }
  });
  source.on('tileloaderror', () => explain('A part of the map could not be read; move the map to try again.'));
}

// Say what the server answers for the file that cannot be read, or else `text`.
async function explain(text) {
  const turn = state.turn;
  let said = text;
  try {
    for (const url of Object.values(entry().files)) {
      await checkParts(url);
    }
  } catch (error) {
    said = error;
  }
  if (turn === state.turn) {
    sayError(said);
  }
}

function fit(projection, options) {
  const finest = Math.min(...options.resolutions);
  map.setView(new View({
    projection, center: getCenter(options.extent), resolution: finest,
    minResolution: finest / 16, maxResolution: finest * Math.max(entry().width, entry().height) / 100,
    constrainOnlyCenter: true, extent: options.extent, showFullExtent: true,
  }));
  map.getView().fit(options.extent, {padding: [20, 20, 20, 20]});
  state.extent = options.extent;
}

// Draw the panel and the layers as the settings say.
function draw(panel = true) {
  if (panel) {
    drawPanel(document.getElementById('panel'), state.catalog, state.number, state.settings,
      {change, toggle, choose: show});
    review?.drawInto(document.getElementById('panel'));
    labels?.drawInto(document.getElementById('panel'));
  }
  const {classes, scene, polygons} = state.layers;
  if (!classes) {
    return;
  }
  classes.setStyle(classStyle(entry(), state.band, state.settings));
  classes.setOpacity(state.settings.opacity / 100);
  classes.setVisible(!scene || state.side !== 'scene');
  scene?.setVisible(state.side !== 'map');
  polygons.setVisible(state.settings.polygons);
  swipe.cut(scene && state.side === 'both' ? 'classes' : null);
}

function change(settings, panel = true) {
  if (!panel && 'opacity' in settings) {
    Object.assign(state.settings, settings);
    state.layers.classes?.setOpacity(settings.opacity / 100);
    return;
  }
  const confidenceAlone = !panel && Object.keys(settings).join() === 'least';
  Object.assign(state.settings, settings);
  if (confidenceAlone) {
    state.layers.classes?.updateStyleVariables({least: settings.least});
    return;
  }
  draw(panel);
  loadPolygons();
}

function toggle(value) {
  const on = state.settings.on;
  if (!on.delete(value)) {
    on.add(value);
  }
  draw();
}

// Where labels are clicked, the page counts pixels.
function ground(x, y) {
  const [a, b, c, d, e, f] = labels ? entry().transform : [1, 0, 0, 0, 1, 0];
  return labels ? [a * x - b * y + c, d * x - e * y + f] : [x, y];
}

// What lies under the pointer: coordinates, class, confidence, truth.
function describe(event) {
  const layer = state.layers.classes;
  if (!layer) {
    return;
  }
  const [x, y] = event.coordinate;
  const digits = entry().geographic ? 6 : 1;
  const parts = [ground(x, y).map((each) => each.toFixed(digits)).join(', ')];
  const bands = layer.getData(event.pixel);
  const name = (value) => entry().classes.find((each) => each.value === value)?.name || 'no data';
  if (bands) {
    parts.push(name(bands[state.band.map - 1]));
    if (state.band.confidence && bands[state.band.confidence - 1] !== NO_DATA) {
      parts.push(`confidence ${bands[state.band.confidence - 1]} %`);
    }
    if (state.band.truth) {
      const [made, truth] = [bands[state.band.map - 1], bands[state.band.truth - 1]];
      const wrong = made !== truth && made !== NO_DATA && truth !== NO_DATA;
      parts.push(`truth: ${name(truth)}${wrong ? `, taken for ${name(made)}` : ''}`);
    }
  }
  const feature = map.forEachFeatureAtPixel(event.pixel, (each) => each,
    {layerFilter: (each) => each === state.layers.polygons});
  if (feature) {
    const area = feature.get('area_m2');
    parts.push(`polygon: ${feature.get('class_name')}${area ? `, ${Math.round(area).toLocaleString('en')} m²` : ''}`);
  }
  document.getElementById('status').textContent = parts.join('  ·  ');
}

async function loadPolygons() {
  const {polygons} = state.layers;
  if (!polygons || !state.settings.polygons) {
    return;
  }
  try {
    const box = map.getView().calculateExtent(map.getSize());
    const answer = await readPolygons(entry().polygons, box);
    const source = polygons.getSource();
    source.clear(true);
    source.addFeatures(source.getFormat().readFeatures(answer));
    if (answer.too_many) {
      say(`More than ${answer.too_many.toLocaleString('en')} polygons lie here: zoom in to see them.`);
    } else if (state.crowded) {
      say('');
    }
    state.crowded = Boolean(answer.too_many);
  } catch (error) {
    sayError(error);
  }
}

function press(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.matches('select, input[type=text]')) {
    return;
  }
  const maps = state.catalog ? state.catalog.maps.length : 0;
  const settings = state.settings;
  const go = (step) => show((state.number + step + maps) % maps);
  const kinds = {m: 'map', t: 'truth', d: 'disagreement', ...(labels && {i: 'unsure'})};
  if (!settings || review?.press(event.key, event.repeat) || labels?.press(event.key)) {
    return;
  }
  if (/^[1-9]$/.test(event.key) && entry().classes[event.key - 1]) {
    toggle(entry().classes[event.key - 1].value);
  } else if (event.key in kinds && ('mi'.includes(event.key) || entry().files.truth)) {
    change({kind: kinds[event.key]});
  } else if (event.key === 'a') {
    const all = settings.on.size < entry().classes.length;
    change({on: new Set(all ? entry().classes.map((each) => each.value) : [])});
  } else if (event.key === 'p' && entry().polygons) {
    change({polygons: !settings.polygons});
  } else if (event.key === 's' && state.layers.scene) {
    state.side = SIDES[(SIDES.indexOf(state.side) + 1) % SIDES.length];
    draw();
  } else if (event.key === '[' || event.key === ']') {
    swipe.set(swipe.share + (event.key === '[' ? -0.05 : 0.05));
  } else if (event.key === 'f' && state.layers.classes) {
    map.getView().fit(state.extent, {padding: [20, 20, 20, 20]});
  } else if ((event.key === 'n' || event.key === 'N') && maps > 1) {
    go(event.key === 'n' ? 1 : -1);
  }
}

function fail(error) {
  state.errors.push(String(error));
  sayError(error);
}

window.addEventListener('error', (event) => fail(event.error || event.message));
window.addEventListener('unhandledrejection', (event) => fail(event.reason));
window.viewer = {state, labels: () => labels, review: () => review, map: () => map, swipe: () => swipe};
start().catch(fail);
