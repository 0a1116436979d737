"use strict";
// Reads out the values under the pointer, or at the arrow keys; every number also stands in the tables.
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector(".area svg"), cursor = svg.querySelector(".cursor");
  const readout = figure.querySelector(".readout");
  const steps = [...new Set(data.series.flatMap(each => each.points.map(point => point[0])))].sort((a, b) => a - b);
  const nearest = (points, step) =>
    points.reduce((best, point) => Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);
  let at = -1;
  const show = index => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[at], x = 1000 * (step - data.low) / (data.high - data.low);
    cursor.setAttribute("d", `M${x} 0v1000`);
    const one = data.series.length === 1;
    readout.textContent = `step ${Math.round(step)}: ` + data.series.map(each => {
      const value = nearest(each.points, step)[1].toLocaleString("en", {maximumSignificantDigits: 5});
      return one ? value : `${each.name} ${value}`;
    }).join(", ");
  };
  const hide = () => { cursor.setAttribute("d", ""); readout.textContent = ""; at = -1; };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const step = data.low + (data.high - data.low) * (event.clientX - box.left) / box.width;
    show(steps.indexOf(nearest(steps.map(each => [each]), step)[0]));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const move = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity}[event.key];
    if (move === undefined) return;
    event.preventDefault();
    show(at < 0 && Math.abs(move) === 1 ? 0 : at + move);
  });
}
// A link to a check opens the list that holds it.
const unfold = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target && target.closest("details");
  if (folded && !folded.open) { folded.open = true; target.scrollIntoView(); }
};
addEventListener("hashchange", unfold);
unfold();
