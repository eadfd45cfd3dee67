// The layers of one map. All of them have the grid of the map, so that nothing is reprojected, and
// any CRS does, also none: coordinates on the page are those of the file.

import GeoJSON from 'ol/format/GeoJSON.js';
import VectorLayer from 'ol/layer/Vector.js';
import WebGLTile from 'ol/layer/WebGLTile.js';
import {addProjection} from 'ol/proj.js';
import Projection from 'ol/proj/Projection.js';
import GeoTIFF from 'ol/source/GeoTIFF.js';
import VectorSource from 'ol/source/Vector.js';
import Style from 'ol/style/Style.js';
import Stroke from 'ol/style/Stroke.js';
import Fill from 'ol/style/Fill.js';

const NO_DATA = 255;
const TRANSPARENT = [0, 0, 0, 0];
const WRONG = [230, 0, 200, 1];

// A CRS of the map's own, registered so that the tiles of a rotated grid can be turned.
export function projectionOf(entry, number) {
  const projection = new Projection({
    code: `MAPSAGE:${number}`,
    units: entry.geographic ? 'degrees' : 'm',
    metersPerUnit: entry.meters_per_unit || 1,
    getPointResolution: (resolution) => resolution,
  });
  addProjection(projection);
  return projection;
}

export function sceneLayer(entry, projection) {
  return new WebGLTile({
    className: 'scene',
    source: new GeoTIFF({sources: [{url: entry.files.scene}], projection, convertToRGB: 'auto', transition: 0}),
  });
}

// The class map, with confidence and truth as further bands of one source. No value is taken for no
// data by the source, which would turn it into class 0: the colors say what 255 is.
export function classLayer(entry, projection) {
  const kinds = ['map', 'confidence', 'truth'].filter((kind) => entry.files[kind]);
  const source = new GeoTIFF({
    sources: kinds.map((kind) => ({url: entry.files[kind], nodata: -1})),
    projection, normalize: false, interpolate: false, transition: 0,
  });
  const layer = new WebGLTile({className: 'classes', source, style: {color: TRANSPARENT}});
  const band = Object.fromEntries(kinds.map((kind, number) => [kind, number + 1]));
  return {layer, band};
}

// What is drawn: `settings` has the classes that are on, the kind shown and the least confidence.
export function classStyle(entry, band, settings) {
  const colors = Array.from({length: 256}, () => 'rgba(0,0,0,0)');
  for (const each of entry.classes) {
    if (settings.on.has(each.value)) {
      colors[each.value] = `rgb(${each.color.join(',')})`;
    }
  }
  const shown = settings.kind === 'truth' ? band.truth : band.map;
  let color = ['palette', ['band', shown], colors];
  if (settings.kind === 'disagreement') {
    const known = ['all', ['!=', ['band', band.truth], NO_DATA], ['!=', ['band', band.map], NO_DATA]];
    color = ['case', ['all', known, ['!=', ['band', band.map], ['band', band.truth]]], WRONG, TRANSPARENT];
  }
  if (settings.kind === 'unsure') { // from nothing at 100 % to red where all classes are as probable
    const doubt = ['interpolate', ['linear'], ['band', band.confidence], 40, [215, 25, 28, 1], 70, [255, 190, 80, 0.8], 100,
      [255, 255, 255, 0]];
    color = ['case', ['==', ['band', band.map], NO_DATA], TRANSPARENT, doubt];
  }
  if (band.confidence && settings.kind !== 'truth') {
    color = ['case', ['<', ['band', band.confidence], ['var', 'least']], TRANSPARENT, color];
  }
  return {variables: {least: settings.least}, color};
}

export function polygonLayer(entry) {
  const colors = Object.fromEntries(entry.classes.map((each) => [each.value, each.color]));
  return new VectorLayer({
    className: 'polygons',
    source: new VectorSource({format: new GeoJSON()}),
    style: (feature) => new Style({
      stroke: new Stroke({color: `rgb(${(colors[feature.get('class_id')] || [0, 0, 0]).join(',')})`, width: 2}),
      fill: new Fill({color: 'rgba(0,0,0,0.01)'}),
    }),
  });
}
