// The line under a chart says what is pointed at, touched, or reached by the arrow keys.
"use strict";

for (const chart of document.querySelectorAll(".chart")) {
  const marks = [...chart.querySelectorAll("[data-says]")];
  const line = chart.querySelector(".says"), plot = chart.querySelector(".plot");
  let picked = null;

  function pick(mark) {
    picked?.classList.remove("picked");
    picked = mark;
    picked?.classList.add("picked");
    line.textContent = mark ? mark.dataset.says : "";
  }

  for (const kind of ["pointerover", "pointerdown"]) {
    plot.addEventListener(kind, (event) => {
      const mark = event.target.closest("[data-says]");
      if (mark) pick(mark);
    });
  }
  if (!marks.length) continue;
  plot.setAttribute("tabindex", "0");
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") pick(null);
    if (!step) return;
    event.preventDefault();
    const next = picked ? marks.indexOf(picked) + step : 0;
    pick(marks[Math.max(0, Math.min(marks.length - 1, next))]);
  });
}
