// Questions to the server. Each failure becomes a sentence that says what to do.

const AGAIN = 'Start tools/view.py again, or reload the page.';

export async function readCatalog() {
  let answer;
  try {
    answer = await fetch('catalog.json', {cache: 'no-store'});
  } catch (error) {
    throw new Error(`The server of this page does not answer (${error.message}). ${AGAIN}`);
  }
  if (!answer.ok) {
    throw new Error(`catalog.json cannot be read (status ${answer.status}): ${await answer.text()}`);
  }
  return answer.json();
}

// A host that sends whole files would make the browser load gigabytes, or fail without a reason.
export async function checkParts(url) {
  const stop = new AbortController();
  let answer;
  try {
    answer = await fetch(url, {headers: {Range: 'bytes=0-15'}, signal: stop.signal});
  } catch (error) {
    throw new Error(`The server of this page does not answer (${error.message}). ${AGAIN}`);
  }
  if (!answer.ok) {
    throw new Error(`${(await answer.text()).slice(0, 300) || url} (status ${answer.status})`);
  }
  if (answer.status !== 206) {
    stop.abort();
    throw new Error('This web server sends whole files only: it does not know byte ranges, by ' +
      'which the viewer reads parts of a map. Use one that does (nginx, Apache, GitHub Pages), or ' +
      'tools/view.py.');
  }
  await answer.arrayBuffer();
}

export async function readPolygons(url, box) {
  const answer = await fetch(url.endsWith('.json') ? url : `${url}?box=${box.join(',')}`);
  if (!answer.ok) {
    throw new Error(`${await answer.text()} (status ${answer.status})`);
  }
  return answer.json();
}
