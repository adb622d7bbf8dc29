"use strict";
(() => {
  const page = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  function button(words, act) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = words;
    made.addEventListener("click", act);
    return made;
  }

  // A page opened from a file may have no storage.
  function stored(theme) {
    try {
      if (theme) localStorage.setItem("asynckfold-theme", theme);
      return localStorage.getItem("asynckfold-theme");
    } catch {
      return null;
    }
  }

  function themes() {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (page.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
    const name = () => { made.textContent = isDark() ? "Light theme" : "Dark theme"; };
    const made = button("", () => {
      page.dataset.theme = isDark() ? "light" : "dark";
      stored(page.dataset.theme);
      name();
    });
    name();
    system.addEventListener("change", name);
    document.querySelector("header").append(made);
  }

  function tabs() {
    const list = document.querySelector("header nav");
    // A page on two runs has no tabs.
    if (!list) return scrollers();
    const links = all("a", list);
    const panels = links.map((link) => document.querySelector(link.hash));
    list.setAttribute("role", "tablist");
    links.forEach((link, place) => {
      link.id = `tab-${panels[place].id}`;
      link.setAttribute("role", "tab");
      link.setAttribute("aria-controls", panels[place].id);
      panels[place].setAttribute("role", "tabpanel");
      panels[place].removeAttribute("aria-label");
      panels[place].setAttribute("aria-labelledby", link.id);
    });
    function show(chosen) {
      links.forEach((link, place) => {
        const on = place === chosen;
        link.setAttribute("aria-selected", String(on));
        link.tabIndex = on ? 0 : -1;
        panels[place].hidden = !on;
      });
      scrollers();
    }
    function follow() {
      let target = null;
      try {
        target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
      } catch {
        // Not a section of this page.
      }
      const chosen = panels.findIndex((panel) => panel.contains(target));
      show(Math.max(chosen, 0));
      if (!target || panels.includes(target)) return;
      for (const item of all("details")) if (item.contains(target)) item.open = true;
      target.scrollIntoView();
    }
    links.forEach((link, place) => {
      link.addEventListener("click", (event) => {
        event.preventDefault();
        history.replaceState(null, "", link.hash);
        show(place);
        scrollTo(0, 0);
      });
    });
    list.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
      const step = event.key === " " ? 0 : steps[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const next = (links.indexOf(document.activeElement) + step + links.length) % links.length;
      links[next].focus();
      links[next].click();
    });
    addEventListener("hashchange", follow);
    follow();
  }

  function copying() {
    const verdict = document.getElementById("verdict");
    const words = all(":scope > h1, :scope > p:not(.note)", verdict)
      .map((line) => line.textContent.trim())
      .concat(all(".card").map((card) => all("h2, .big", card).map((line) => line.textContent).join(": ")));
    const state = document.createElement("span");
    state.setAttribute("role", "status");
    const made = button("Copy verdict", async () => {
      const text = words.join("\n").replaceAll("\u00a0", " ");
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        const area = document.createElement("textarea");
        area.value = text;
        document.body.append(area);
        area.select();
        document.execCommand("copy");
        area.remove();
        made.focus();
      }
      state.textContent = " Copied";
    });
    const line = document.createElement("p");
    line.className = "tools";
    line.append(made, state);
    verdict.append(line);
  }

  const number = (text) => parseFloat(text.replace(/^[^\d.+-]+(?=[\d.])/, ""));

  function sorting(table) {
    const body = table.tBodies[0];
    all("thead th", table).forEach((head, column) => {
      const words = head.textContent;
      if (!words) return;
      const isNumber = head.classList.contains("number");
      const sort = button(words, () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        all("thead th", table).forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column].textContent;
        const sign = down ? -1 : 1;
        const compare = (one, other) => {
          if (!isNumber) return sign * key(one).localeCompare(key(other), undefined, { numeric: true });
          const [first, second] = [number(key(one)), number(key(other))];
          if (isNaN(first) || isNaN(second)) return isNaN(first) - isNaN(second);
          return sign * (first - second);
        };
        body.append(...[...body.rows].sort(compare));
      });
      // With the places where a long name may break.
      sort.replaceChildren(...head.childNodes);
      head.append(sort);
    });
  }

  function filtering(table) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 12) return;
    const label = document.createElement("label");
    const field = document.createElement("input");
    const count = document.createElement("span");
    field.type = "search";
    count.setAttribute("role", "status");
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      const shown = rows.filter((row) => {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        return !row.hidden;
      });
      count.textContent = ` ${shown.length} of ${rows.length} rows`;
    });
    label.append("Filter ", field);
    const line = document.createElement("p");
    line.className = "tools";
    line.append(label, count);
    table.parentElement.before(line);
  }

  function toggling() {
    all("[data-legend]").forEach((entry) => {
      const figure = entry.closest("figure");
      const made = button("", () => {
        const on = made.getAttribute("aria-pressed") !== "true";
        made.setAttribute("aria-pressed", String(on));
        all("[data-series]", figure)
          .filter((drawn) => drawn.dataset.series === entry.dataset.legend)
          .forEach((drawn) => drawn.classList.toggle("off", !on));
      });
      made.setAttribute("aria-pressed", "true");
      made.append(...entry.childNodes);
      entry.append(made);
    });
  }

  // A pointer, a tap or an arrow key tells what a mark stands for; without script its title does.
  function telling() {
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    document.body.append(tip);
    all("figure").forEach((figure) => {
      const said = document.createElement("p");
      said.setAttribute("role", "status");
      figure.lastElementChild.before(said);
      all("title", figure).forEach((title) => {
        title.parentElement.dataset.said = title.textContent;
        title.remove();
      });
      const pointed = (event) => event.target.closest("[data-said]");
      function hold(mark) {
        all(".at", figure).forEach((other) => other.classList.remove("at"));
        mark.classList.add("at");
        said.textContent = mark.dataset.said;
      }
      figure.addEventListener("pointermove", (event) => {
        const mark = pointed(event);
        tip.hidden = !mark;
        if (!mark) return;
        tip.textContent = mark.dataset.said;
        const below = event.clientY + 16;
        const above = event.clientY - 10 - tip.offsetHeight;
        tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8))}px`;
        tip.style.top = `${below + tip.offsetHeight > innerHeight ? above : below}px`;
      });
      figure.addEventListener("pointerleave", () => { tip.hidden = true; });
      figure.addEventListener("click", (event) => {
        const mark = pointed(event);
        if (mark) hold(mark);
      });
      const marks = all("[data-said]", figure).filter((mark) => !mark.querySelector("[data-said]"));
      if (!marks.length) return;
      figure.tabIndex = 0;
      figure.setAttribute("aria-keyshortcuts", "ArrowRight ArrowLeft");
      figure.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step || event.target !== figure) return;
        event.preventDefault();
        const shown = marks.filter((mark) => !mark.closest(".off"));
        const at = shown.findIndex((mark) => mark.classList.contains("at"));
        if (shown.length) hold(shown[(Math.max(at, step < 0 ? 0 : -1) + step + shown.length) % shown.length]);
      });
    });
  }

  // Only what scrolls is a stop for the keyboard.
  function scrollers() {
    all(".scroll").forEach((place) => {
      const scrolls = place.scrollWidth > place.clientWidth || place.scrollHeight > place.clientHeight + 1;
      for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", `${place.firstElementChild.getAttribute("aria-label")}, scrollable`]]) {
        if (scrolls) place.setAttribute(name, value);
        else place.removeAttribute(name);
      }
    });
  }

  // Of a run that goes on: tab and place stay, and nothing that is typed or marked is lost.
  function renewing() {
    const wanted = document.querySelector("meta[name=renewal-seconds]");
    const isFree = () => getSelection().isCollapsed && all("input").every((field) => !field.value);
    if (wanted) setInterval(() => { if (isFree()) location.reload(); }, 1000 * wanted.content);
  }

  const theme = stored();
  if (theme) page.dataset.theme = theme;
  document.addEventListener("DOMContentLoaded", () => {
    themes();
    copying();
    all("table:not(.settings, .heat)").forEach((table) => { sorting(table); filtering(table); });
    toggling();
    telling();
    tabs();
    renewing();
    addEventListener("resize", scrollers);
    all("details").forEach((item) => item.addEventListener("toggle", scrollers));
  });
})();
