// The border between scene and map. The map's layer has an element of its own, of which a part is
// cut off; cutting in WebGL instead goes wrong where layers share a canvas.

export class Swipe {
  constructor(handle, map, moved) {
    this.handle = handle;
    this.map = map;
    this.share = 0.5;
    this.layer = null;
    this.moved = moved;
    const drag = (event) => this.set((event.clientX - map.getTargetElement().getBoundingClientRect().left) /
      map.getTargetElement().clientWidth);
    handle.addEventListener('pointerdown', (event) => {
      handle.setPointerCapture(event.pointerId);
      handle.addEventListener('pointermove', drag);
    });
    handle.addEventListener('pointerup', () => handle.removeEventListener('pointermove', drag));
    // The handle covers a strip of the map, in which the wheel zooms as beside it.
    handle.addEventListener('wheel', (event) => {
      event.preventDefault();
      map.getViewport().dispatchEvent(new WheelEvent(event.type, event));
    }, {passive: false});
    map.on('postrender', () => this.draw());
  }

  // `layer` is the class name of the layer right of the border, null for no border.
  cut(layer) {
    this.layer = layer;
    this.draw();
  }

  set(share) {
    this.share = Math.min(1, Math.max(0, share));
    this.draw();
    this.moved();
  }

  draw() {
    const target = this.map.getTargetElement();
    const left = this.share * target.clientWidth;
    this.handle.hidden = !this.layer;
    this.handle.style.left = `${left}px`;
    this.handle.ariaValueNow = Math.round(100 * this.share);
    for (const element of target.querySelectorAll('.classes, .polygons')) {
      element.style.clipPath = this.layer ? `inset(0 0 0 ${left}px)` : '';
    }
  }
}
