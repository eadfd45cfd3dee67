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
  try {
    return await answer.json();
  } catch (error) { // some web servers answer with a page where there is no file
    throw new Error(`catalog.json is not what tools/view.py writes (${error.message}). Put all files that ` +
      '--static made on this web server, or start tools/view.py.');
  }
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

// The tiles of a review, the worst first, with what is decided of each.
export async function readReview() {
  return (await ask('review.json', {cache: 'no-store'})).json();
}

// Have a decision written; where somebody else has decided meanwhile, the answer has a sentence.
export async function decide(decision) {
  return (await ask('review', {
    method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(decision),
  }, [409])).json();
}

// Change labels; the answer has all of them.
export async function changeLabels(change) {
  return (await ask('labels', {
    method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(change),
  })).json();
}

async function ask(url, options, expected = []) {
  let answer;
  try {
    answer = await fetch(url, options);
  } catch (error) {
    throw new Error(`The server of this page does not answer (${error.message}). Nothing was decided. ${AGAIN}`);
  }
  if (!answer.ok && !expected.includes(answer.status)) {
    throw new Error(await answer.text());
  }
  return answer;
}
