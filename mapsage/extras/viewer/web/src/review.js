// A review: the tiles of all maps, the worst first, and keys for what is decided of each. The
// server has written a decision before this page goes on to the next tile.

import Feature from 'ol/Feature.js';
import {boundingExtent} from 'ol/extent.js';
import Polygon from 'ol/geom/Polygon.js';
import VectorLayer from 'ol/layer/Vector.js';
import VectorSource from 'ol/source/Vector.js';
import Stroke from 'ol/style/Stroke.js';
import Style from 'ol/style/Style.js';
import {decide, readReview} from './files.js';
import {element} from './panel.js';
import {say, sayError} from './sentence.js';

const WAIT = 1000; // milliseconds between two looks at tiles that are still ranked
const MARGIN = 0.25; // of a tile's side that is seen around it
const KEYS = {w: 'wrong map', l: 'wrong label', u: 'unsure', r: 'right'};
const OUTLINE = [
  new Style({stroke: new Stroke({color: '#000', width: 5}), zIndex: 1}),
  new Style({stroke: new Stroke({color: '#fff', width: 3, lineDash: [10, 6]}), zIndex: 2}),
];

export class Review {
  // `host` is the page: map() as OpenLayers has it, number() of the map that was chosen, shown() of
  // the one whose layers are there, names() of all, show(number), draw(), which draws the panel,
  // border() and setBorder(share), between scene and map.
  constructor(host) {
    this.host = host;
    this.tiles = null; // null: not reviewing
    this.at = 0;
    this.made = []; // numbers of the tiles decided on this page, for undo
    this.busy = false;
    this.answer = null;
    this.layer = null;
  }

  // Return whether the key was one of a review.
  press(key, repeated) {
    if (key === 'q') {
      this.run(() => (this.tiles ? this.stop() : this.start()));
      return true;
    }
    if (!this.tiles || !(key in KEYS || 'jkz'.includes(key))) {
      return false;
    }
    if (!repeated) { // a key that is held down decides nothing that nobody has seen
      this.run(() => this.act(key));
    }
    return true;
  }

  // One thing at a time: what is pressed meanwhile was meant for another tile.
  async run(action) {
    if (this.busy) {
      return;
    }
    this.busy = true;
    try {
      await action();
    } catch (error) {
      sayError(error);
    } finally {
      this.busy = false;
      this.host.draw();
    }
  }

  async start() {
    for (;;) {
      this.answer = await readReview();
      if (!this.answer.doing) {
        break;
      }
      say(this.answer.doing);
      await new Promise((done) => setTimeout(done, WAIT));
    }
    say('');
    if (!this.answer.tiles.length) {
      throw new Error(`There is nothing to review: no tile holds data. ${this.answer.notes.join(' ')}`);
    }
    this.tiles = this.answer.tiles;
    this.made = [];
    this.border = this.host.border();
    this.host.setBorder(0); // the map lies on the whole tile, and the scene under it by s or the border
    await this.go(this.undecided(0) ?? 0);
  }

  stop() {
    this.tiles = null;
    this.host.setBorder(this.border);
    this.host.map().removeLayer(this.layer);
    this.layer = null;
  }

  async act(key) {
    if (key === 'j' || key === 'k') {
      const next = this.at + (key === 'j' ? 1 : -1);
      await this.go(Math.min(this.tiles.length - 1, Math.max(0, next)));
    } else if (!this.host.map().getLayers().getArray().includes(this.layer)) {
      await this.go(this.at); // another map was looked at meanwhile
    } else if (key === 'z') {
      await this.undo();
    } else if (await this.decide(this.at, KEYS[key])) {
      this.made = [...this.made.filter((each) => each !== this.at), this.at];
      const next = this.undecided(this.at + 1) ?? this.undecided(0);
      if (next === undefined) {
        this.host.draw();
        say(`All ${this.tiles.length.toLocaleString('en')} tiles are decided.`);
      } else {
        await this.go(next);
      }
    }
  }

  async undo() {
    const last = this.made.pop() ?? this.at;
    if (!this.tiles[last].decision) {
      say('Nothing is decided of this tile. Go to one with j and k, and take its decision back with z.');
      return;
    }
    await this.go(last);
    await this.decide(last, null);
  }

  // Return whether the server has written it.
  async decide(number, decision) {
    const {id, before} = this.tiles[number];
    const answer = await decide({tile: id, decision, before});
    this.tiles[number] = answer.tile;
    say(answer.sentence || '');
    return !answer.sentence;
  }

  undecided(from) {
    const found = this.tiles.findIndex((each, number) => number >= from && !each.decision);
    return found < 0 ? undefined : found;
  }

  async go(number) {
    const tile = this.tiles[number];
    this.at = number;
    const map = this.host.map();
    map.removeLayer(this.layer); // nothing is decided of a tile whose map fails to appear
    if (this.host.number() !== tile.map) {
      await this.host.show(tile.map);
    }
    if (this.host.shown() !== tile.map) {
      return; // the page has said why
    }
    const ring = [...tile.corners, tile.corners[0]];
    this.layer = new VectorLayer({
      className: 'tile', style: OUTLINE,
      source: new VectorSource({features: [new Feature(new Polygon([ring]))]}),
    });
    map.addLayer(this.layer);
    const extent = boundingExtent(tile.corners);
    const side = Math.max(extent[2] - extent[0], extent[3] - extent[1]) * MARGIN;
    map.getView().fit([extent[0] - side, extent[1] - side, extent[2] + side, extent[3] + side]);
    say('');
  }

  // Put the section of the review on top of the panel.
  drawInto(panel) {
    const parts = [element('h2', {textContent: 'review'})];
    const button = (text, key) => {
      const made = element('button', {type: 'button', textContent: `${text} (${key})`});
      made.dataset.key = key;
      made.addEventListener('click', () => this.press(key, false));
      return made;
    };
    if (!this.tiles) {
      parts.push(element('p', {textContent: 'Go through the tiles of all maps, the worst first.'}),
        element('div', {className: 'buttons'}, [button('review', 'q')]));
    } else {
      const tile = this.tiles[this.at];
      const decided = this.tiles.filter((each) => each.decision).length;
      const count = (value) => value.toLocaleString('en');
      const what = tile.measure ? `${tile.measure} ${(100 * tile.score).toFixed(1)} %`
        : 'neither labels nor confidence to rank by';
      parts.push(
        element('p', {id: 'tile', textContent: `Tile ${count(this.at + 1)} of ${count(this.tiles.length)}, ` +
          `${this.host.names()[tile.map]}: ${what}`}),
        element('p', {id: 'decision', textContent: tile.decision || (tile.earlier
          ? `not decided; of an earlier map: ${tile.earlier}` : 'not decided')}),
        element('div', {className: 'buttons'}, Object.entries(KEYS).map(([key, text]) => {
          const made = button(text, key);
          made.ariaPressed = tile.decision === text;
          return made;
        })),
        element('div', {className: 'buttons'}, [
          button('before', 'k'), button('next', 'j'), button('undo', 'z'), button('end', 'q')]),
        element('p', {textContent: `${count(decided)} decided, in ${this.answer.file}`}),
        ...this.answer.notes.map((textContent) => element('p', {className: 'note', textContent})));
    }
    panel.prepend(element('section', {id: 'review'}, parts));
  }
}
