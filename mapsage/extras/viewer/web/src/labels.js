// Labels by clicks: a click on the ground adds a point of the chosen class, and the server fits a
// map to the points, of which the page asks for the tiles in view. Coordinates are pixels.

import Feature from 'ol/Feature.js';
import Point from 'ol/geom/Point.js';
import VectorLayer from 'ol/layer/Vector.js';
import WebGLTile from 'ol/layer/WebGLTile.js';
import DataTile from 'ol/source/DataTile.js';
import VectorSource from 'ol/source/Vector.js';
import CircleStyle from 'ol/style/Circle.js';
import Fill from 'ol/style/Fill.js';
import Stroke from 'ol/style/Stroke.js';
import Style from 'ol/style/Style.js';
import TileGrid from 'ol/tilegrid/TileGrid.js';
import {changeLabels} from './files.js';
import {element} from './panel.js';
import {say, sayError} from './sentence.js';

const TILE = 256;
const COLORS = ['#e41a1c', '#377eb8', '#4daf4a', '#ffd92f', '#984ea3', '#ff7f00', '#a65628', '#f781bf', '#00c2c7',
  '#666666'];

// Where a raster of the page lies: its pixels from 0, 0 to the right and down.
export function pixelView({width, height}) {
  const resolutions = [1];
  while (Math.max(width, height) > TILE * resolutions[0]) {
    resolutions.unshift(2 * resolutions[0]);
  }
  return {extent: [0, -height, width, 0], resolutions};
}

// A layer of tiles that the server computes; `kind` is picture or classes.
export function labelLayer(entry, number, kind, version, projection) {
  const {extent, resolutions} = pixelView(entry);
  const isPicture = kind === 'picture';
  const source = new DataTile({
    loader: async (z, x, y) => {
      const answer = await fetch(`labels/${number}/${kind}/${version}/${resolutions.length - 1 - z}/${x}/${y}`);
      if (!answer.ok) {
        throw new Error(await answer.text());
      }
      const bytes = new Uint8Array(await answer.arrayBuffer());
      return isPicture ? bytes : Float32Array.from(bytes); // a shader sees bytes as shares of 255
    },
    tileGrid: new TileGrid({extent, resolutions, tileSize: TILE, origin: [0, 0]}),
    projection, bandCount: isPicture ? 4 : 2, interpolate: isPicture, transition: 0, wrapX: false,
  });
  // What lies around the view is computed after it, at lower resolutions.
  return new WebGLTile({className: isPicture ? 'scene' : 'classes', source, preload: 2,
    ...(isPicture ? {} : {style: {color: [0, 0, 0, 0]}})});
}

export class Labels {
  // `host` is the page: map() as OpenLayers has it, number() of the raster that is shown, entries()
  // of all, draw(), which draws panel and layers, and redraw(), which shows the map of new labels.
  constructor(host, state) {
    this.host = host;
    this.state = state;
    this.shown = state.classes.map((each) => each.name); // on the map
    this.names = [...this.shown]; // with those that have no point yet
    this.colors = Object.fromEntries(state.classes.map((each) => [each.name, each.color]));
    while (this.names.length < 2) {
      this.addClass();
    }
    this.chosen = this.names[0];
    this.busy = false;
    this.waiting = []; // clicks while the server fits
    this.unsure = null;
    this.layer = new VectorLayer({source: new VectorSource(), zIndex: 1, style: (feature) => new Style({
      image: new CircleStyle({radius: 6, fill: new Fill({color: feature.get('color')}),
        stroke: new Stroke({color: '#fff', width: 2})}),
    })});
    this.take(state);
  }

  addClass() {
    let number = this.names.length + 1;
    while (this.names.includes(`class ${number}`)) {
      number += 1;
    }
    const name = `class ${number}`;
    this.names.push(name);
    this.colors[name] = COLORS.find((color) => !Object.values(this.colors).includes(color)) || COLORS[number % 10];
    this.chosen = name;
  }

  // The classes as the page has those of a map; those on the map come first, by their values.
  take(state) {
    this.state = state;
    for (const {name, color} of state.classes) {
      this.colors[name] = color;
    }
    const known = state.classes.map((each) => each.name);
    const before = this.names;
    const added = known.filter((name) => !before.includes(name));
    // A name that a rename took away, or its undo; classes without a point stay.
    const gone = added.length ? this.shown.filter((name) => !known.includes(name)) : [];
    this.names = [...before.filter((name) => !gone.includes(name)), ...added];
    this.shown = known;
    if (!this.names.includes(this.chosen)) {
      this.chosen = this.names[0];
    }
    for (const entry of this.host.entries()) {
      entry.classes = state.classes.map(({name, color}, value) => ({name, value, share: null,
        color: [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16))}));
    }
    this.drawPoints();
  }

  drawPoints() {
    const source = this.layer.getSource();
    source.clear();
    source.addFeatures(this.state.points.filter((point) => point.file === this.host.number()).map((point) =>
      new Feature({geometry: new Point([point.x, -point.y]), color: this.colors[point.name]})));
  }

  click([x, y]) {
    this.send({do: 'add', file: this.host.number(), x, y: -y, name: this.chosen, color: this.colors[this.chosen]});
  }

  // Return whether the key was one of labels.
  press(key) {
    if (/^[1-9]$/.test(key) && this.names[key - 1]) {
      this.chosen = this.names[key - 1];
      this.host.draw();
    } else if (key === 'z') {
      this.send({do: 'undo'});
    } else if (key === 'u') {
      this.send({do: 'unsure', file: this.host.number()});
    } else {
      return false;
    }
    return true;
  }

  // One request at a time, in the order of the clicks.
  async send(request) {
    this.waiting.push(request);
    if (this.busy) {
      return;
    }
    this.busy = true;
    try {
      while (this.waiting.length) {
        await this.ask(this.waiting.shift());
      }
    } catch (error) {
      this.waiting = [];
      sayError(error);
    } finally {
      this.busy = false;
      this.host.draw();
    }
  }

  async ask(request) {
    const before = this.state.version;
    const state = await changeLabels(request);
    say('');
    this.take(state);
    if (state.unsure) {
      const view = this.host.map().getView();
      view.setCenter([state.unsure[0], -state.unsure[1]]);
      say('The map is least sure in the middle of this view: click there.');
    }
    if (state.version !== before) {
      this.host.redraw();
    }
  }

  rename(name, to) {
    if (!to || to === name) {
      return;
    }
    this.names = this.names.includes(to) ? this.names.filter((each) => each !== name)
      : this.names.map((each) => (each === name ? to : each));
    this.colors[to] ??= this.colors[name];
    this.chosen = this.chosen === name ? to : this.chosen;
    if (this.known(name)) {
      this.send({do: 'rename', name, to});
    } else {
      this.host.draw();
    }
  }

  recolor(name, color) {
    this.colors[name] = color;
    if (this.known(name)) {
      this.send({do: 'color', name, color});
    } else {
      this.host.draw();
    }
  }

  known(name) {
    return this.state.classes.some((each) => each.name === name);
  }

  // Put the section of labels on top of the panel.
  drawInto(panel) {
    const rows = this.names.map((name, number) => {
      const radio = element('input', {type: 'radio', name: 'label', value: name, checked: name === this.chosen,
        ariaLabel: `click adds ${name}`});
      radio.addEventListener('change', () => { this.chosen = name; });
      const color = element('input', {type: 'color', value: this.colors[name], ariaLabel: `color of ${name}`});
      color.addEventListener('change', () => this.recolor(name, color.value));
      const text = element('input', {type: 'text', value: name, maxLength: 80, ariaLabel: `name of class ${number + 1}`});
      text.addEventListener('change', () => this.rename(name, text.value.trim()));
      const count = this.state.points.filter((point) => point.name === name).length;
      return element('div', {className: 'label'}, [radio, color, text, element('span', {textContent: count})]);
    });
    const button = (textContent, action, disabled = false) => {
      const made = element('button', {type: 'button', textContent, disabled});
      made.addEventListener('click', action);
      return made;
    };
    const total = this.state.points.length;
    panel.prepend(element('section', {id: 'labels'}, [
      element('h2', {textContent: 'labels'}), ...rows,
      element('div', {className: 'buttons'}, [
        button('new class', () => { this.addClass(); this.host.draw(); }),
        button('undo (z)', () => this.press('z'), !this.state.undo),
        button('least sure (u)', () => this.press('u'), this.state.classes.length < 2)]),
      element('p', {id: 'points', textContent: total ? `${total} point${total > 1 ? 's' : ''} in ${this.state.path}`
        : 'Click on the ground, then choose the next class and click again.'}),
      ...(total > 1 ? [element('p', {textContent: 'The whole map, and how right it is:'}),
        ...this.state.commands.map((textContent) => element('code', {textContent}))] : []),
    ]));
  }
}
