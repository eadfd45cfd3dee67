// One place for what the user has to know: a sentence over the map, never a blank page.

const box = () => document.getElementById('sentence');

export function say(text) {
  box().textContent = text;
  box().hidden = !text;
}

export function sayError(error) {
  const text = String((error && error.message) || error);
  say(text.endsWith('.') ? text : `${text}.`);
}
