"use strict";
// The answer is HTML with data of the stream only as text. A parsed document neither runs scripts nor loads resources.
const byId = (id) => document.getElementById(id);
let failed = null;

async function renew(name) {
  const answer = await fetch(name, { cache: "no-store", signal: AbortSignal.timeout(10000) });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const made = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(name);
  for (const one of document.querySelectorAll(`#${name} details`)) {
    const same = made.querySelector(`#${one.id}`);
    if (same) same.open = one.open;
  }
  byId(name).replaceWith(made);
}

function notice(text) {
  const place = byId("notice");
  place.hidden = !text;
  // Setting an unchanged text would make screen readers read it again.
  if (place.textContent !== text) place.textContent = text;
}

async function look() {
  try {
    await renew("now");
    const { title, notice: said, history } = byId("now").dataset;
    if (history !== byId("history").dataset.version) await renew("history");
    document.title = title;
    failed = null;
    notice(said);
  } catch (error) {
    failed = failed || new Date();
    byId("now").classList.add("old");
    const since = failed.toISOString().slice(11, 19);
    notice(`No answer from lazyshard watch since ${since} UTC: has it ended? This page keeps trying.`);
  }
  setTimeout(next, Math.max(1, Number(byId("now").dataset.interval)) * 1000);
}

function next() {
  if (!document.hidden) return look();
  // A hidden page must not cause refreshes.
  document.addEventListener("visibilitychange", next, { once: true });
}

setTimeout(next, 1000);
