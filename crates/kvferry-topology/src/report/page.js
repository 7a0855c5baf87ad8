"use strict";
// Only comfort: titles at once instead of after a wait, and the heat map by keys and on another scale. The page says all of it without.
(() => {
  const tip = document.getElementById("tip");
  const heat = document.getElementById("heat");
  const data = JSON.parse(document.getElementById("answer").textContent);
  let shown = null;

  // A cell's title may be short; the names stand in the data.
  const words = (element, title) => {
    if (!heat || element.parentNode.parentNode !== heat) return title;
    const row = Number(element.parentNode.getAttribute("transform").match(/ (\d+)\)/)[1]);
    const column = Number(element.getAttribute("x"));
    const size = title.split(" ").slice(-2).join(" ");
    return `${data.traffic.rows[row]} → ${data.traffic.columns[column]}: ${size}`;
  };

  const hide = () => {
    if (!shown) return;
    shown.element.prepend(shown.title);
    shown.element.classList.remove("at");
    shown = null;
    tip.hidden = true;
  };

  const show = (element, x, y) => {
    if (!shown || shown.element !== element) {
      hide();
      const title = element.querySelector(":scope > title");
      if (!title) return;
      tip.textContent = words(element, title.textContent);
      // The browser would show it a second time.
      title.remove();
      element.classList.add("at");
      shown = { element, title };
      tip.hidden = false;
    }
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
  };

  const titled = (node) => {
    while (node instanceof SVGElement) {
      if ((shown && node === shown.element) || node.querySelector(":scope > title")) return node;
      node = node.parentNode;
    }
    return null;
  };

  document.addEventListener("pointermove", (event) => {
    const element = titled(event.target);
    if (element) show(element, event.clientX, event.clientY);
    else hide();
  });
  document.addEventListener("pointerleave", hide);
  document.addEventListener("scroll", hide, { passive: true });

  if (heat) {
    heat.setAttribute("tabindex", "0");
    const at = new Map();
    for (const group of heat.children) {
      const row = group.getAttribute("transform").match(/ (\d+)\)/)[1];
      for (const cell of group.children) at.set(`${row} ${cell.getAttribute("x")}`, cell);
    }
    let [row, column] = [0, 0];
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    heat.addEventListener("keydown", (event) => {
      const step = steps[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      row = Math.max(0, Math.min(data.traffic.rows.length - 1, row + step[0]));
      column = Math.max(0, Math.min(data.traffic.columns.length - 1, column + step[1]));
      const cell = at.get(`${row} ${column}`);
      if (!cell) return hide();
      const box = cell.getBoundingClientRect();
      show(cell, box.right, box.bottom);
    });
    heat.addEventListener("blur", hide);

    // Letters of colours, from little to much, and how many bytes have which: as the page was made.
    const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    const bytes = data.traffic.cells.map((cell) => cell[2]);
    const [least, most] = bytes.reduce(([low, high], b) => [Math.min(low, b), Math.max(high, b)], [Infinity, 0]);
    const parts = {
      log: (b) => (most > least ? Math.log(b / least) / Math.log(most / least) : 1),
      linear: (b) => b / most,
    };
    const scale = document.getElementById("scale");
    scale.hidden = false;
    scale.addEventListener("change", () => {
      const chosen = scale.elements.scale.value;
      const cells = heat.querySelectorAll("rect");
      bytes.forEach((b, n) => cells[n].setAttribute("class", letters[Math.round(parts[chosen](b) * (letters.length - 1))]));
      heat.parentNode.dataset.scale = chosen;
    });
  }
})();
