//! The page of a simulation in a real browser: what it shows is what it embeds, nothing is fetched, nothing overlaps.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::path::{Path, PathBuf};

use kvferry_tests::browser::Browser;
use kvferry_tests::skip;
use kvferry_topology::answer::Answer;
use kvferry_topology::report::page;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

#[path = "../../crates/kvferry-topology/tests/report/sample.rs"]
mod sample;

/// A wide screen and that of a telephone.
const WIDTHS: [u32; 2] = [1280, 390];

#[test]
fn every_page_shows_what_it_embeds_and_fits_its_screen() {
    let folder = folder();
    let browser = match Browser::open(&folder) {
        Ok(browser) => browser,
        Err(why) => return skip("browser", &why),
    };
    let pages: [(&str, Answer); 6] = [
        ("ranks", sample::ranks()),
        ("nodes", sample::nodes()),
        ("failing", sample::failing()),
        ("analytic", sample::analytic()),
        ("empty", sample::empty()),
        ("hostile", sample::hostile()),
    ];
    for (name, answer) in pages {
        check(&browser, &folder.join(name), name, &answer);
    }
}

#[test]
fn the_policy_names_the_style_and_the_script_of_the_page() {
    let page = page(&sample::empty());
    for (tag, directive) in [("style", "style-src"), ("script", "script-src")] {
        let (start, end) = (format!("<{tag}>"), format!("</{tag}>"));
        let text = page.split_once(&start).unwrap().1.split_once(&end).unwrap().0;
        let hash = data_encoding::BASE64.encode(&Sha256::digest(text));
        let wanted = format!("{directive} 'sha256-{hash}';");
        assert!(page.contains(&wanted), "page.rs must have this hash of its {tag}: {hash}");
    }
}

/// Where pages and pictures of them are left, to look at.
fn folder() -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("report");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn check(browser: &Browser, folder: &Path, name: &str, answer: &Answer) {
    std::fs::create_dir_all(folder).unwrap();
    let file = folder.join("page.html");
    std::fs::write(&file, page(answer)).unwrap();
    for width in WIDTHS {
        let mut grounds = Vec::new();
        for dark in [false, true] {
            browser.look(width, 900, dark).unwrap();
            browser.go(&file).unwrap();
            let what = format!("{name} at {width}{}", if dark { ", dark" } else { "" });
            layout(browser, &what);
            if width == WIDTHS[0] {
                cells(browser, &what, dark);
            }
            grounds.push(browser.run("return getComputedStyle(document.documentElement).backgroundColor").unwrap());
            let picture = browser.picture().unwrap();
            assert_eq!(picture.get(16..20), Some(width.to_be_bytes().as_slice()), "{what}: the picture is not so wide");
            let scheme = if dark { "dark" } else { "light" };
            std::fs::write(folder.join(format!("{width}-{scheme}.png")), picture).unwrap();
        }
        assert_ne!(grounds[0], grounds[1], "{name}: light and dark have the same ground");
    }
    figures(browser, name, answer);
    comfort(browser, name);
    let complaints = browser.complaints().unwrap();
    assert!(complaints.is_empty(), "{name}: {complaints:#?}");
    safety(browser, name, answer);
    let own = format!("file://{}", file.display());
    let requests = browser.requests().unwrap();
    assert!(requests.len() >= 4, "{name}: the log of requests lacks the page's own: {requests:?}");
    assert!(requests.iter().all(|r| *r == own), "{name}: {requests:#?}");
}

/// Nothing is wider than the screen, and no two labels of an axis touch.
fn layout(browser: &Browser, what: &str) {
    let found = browser
        .run(
            r#"
        const faults = [];
        if (document.documentElement.scrollWidth > innerWidth) {
          faults.push(`the page is ${document.documentElement.scrollWidth} wide on ${innerWidth}`);
        }
        for (const element of document.querySelectorAll("main *, header *, footer *")) {
          const box = element.getBoundingClientRect();
          if (box.width > 0 && (box.right > innerWidth + 1 || box.left < -1) && !element.closest(".scroll")) {
            faults.push(`${element.tagName} ${element.getAttribute("class")} reaches from ${box.left} to ${box.right}`);
          }
        }
        let labels = 0;
        for (const axis of document.querySelectorAll(".xl, .y, .cl, .rl")) {
          const boxes = [...axis.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]).filter(([, b]) => b.width > 0);
          labels += boxes.length;
          boxes.forEach(([a, one], n) => {
            for (const [b, two] of boxes.slice(n + 1)) {
              const over = (from, to, low, high) => Math.min(to, high) - Math.max(from, low);
              if (over(one.left, one.right, two.left, two.right) > 0 && over(one.top, one.bottom, two.top, two.bottom) > 1) {
                faults.push(`${axis.getAttribute("class")}: ${a} is over ${b}`);
              }
            }
          });
        }
        if (document.querySelector(".chart, .gantt, #heat") && labels < 6) faults.push(`only ${labels} labels`);
        for (const svg of document.querySelectorAll("svg")) {
          const named = svg.getAttribute("role") === "img" && svg.getAttribute("aria-label");
          if (!named && svg.getAttribute("aria-hidden") !== "true" && !svg.parentNode.closest("svg")) faults.push("a drawing has no name");
        }
        for (const table of document.querySelectorAll("table")) {
          if (!table.caption) faults.push("a table has no caption");
          if ([...table.querySelectorAll("th")].some((th) => !th.getAttribute("scope"))) faults.push("a heading of a table has no scope");
        }
        return faults.slice(0, 20);
        "#,
        )
        .unwrap();
    assert_eq!(found, Value::Array(Vec::new()), "{what}");
}

/// There is a cell for each in the data, at its place, and more bytes are never fainter, on both scales.
fn cells(browser: &Browser, what: &str, dark: bool) {
    let found = browser
        .run(
            r##"
        const data = JSON.parse(document.getElementById("answer").textContent);
        const wanted = data.traffic.cells;
        const heat = document.getElementById("heat");
        if (!heat) return wanted.length ? ["no map"] : [];
        const faults = [];
        const cells = [...heat.querySelectorAll("rect")].map((cell) => {
          const row = Number(cell.parentNode.getAttribute("transform").match(/ (\d+)\)/)[1]);
          return [row, Number(cell.getAttribute("x")), cell];
        });
        if (cells.length !== wanted.length) return [`${cells.length} cells of ${wanted.length}`];
        cells.forEach(([row, column, cell], n) => {
          if (row !== wanted[n][0] || column !== wanted[n][1]) faults.push(`cell ${n} is at ${row}, ${column}`);
        });
        const map = heat.getBoundingClientRect();
        const [wide, high] = [map.width / data.traffic.columns.length, map.height / data.traffic.rows.length];
        for (const n of [0, cells.length >> 1, cells.length - 1]) {
          const box = cells[n][2].getBoundingClientRect();
          const off = Math.hypot(box.left - map.left - wide * wanted[n][1], box.top - map.top - high * wanted[n][0], box.width - wide, box.height - high);
          if (off > 2.5) faults.push(`cell ${n} is ${off} pixels off`);
        }
        const strength = (cell) => {
          const [r, g, b] = getComputedStyle(cell).fill.match(/\d+/g).map((c) => (c / 255) ** 2.2);
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const classes = () => cells.map(([, , cell]) => cell.getAttribute("class")).join("");
        const scales = document.getElementById("scale");
        const first = scales.elements.scale.value;
        const before = classes();
        for (const scale of first === "log" ? ["linear", "log"] : ["log", "linear"]) {
          scales.querySelector(`[value=${scale}]`).click();
          const order = wanted.map(([, , bytes], n) => [bytes, strength(cells[n][2])]).sort((a, b) => a[0] - b[0]);
          for (let n = 1; n < order.length; n++) {
            const step = (order[n][1] - order[n - 1][1]) * (DARK ? 1 : -1);
            if (step < -1e-3) faults.push(`${scale}: ${order[n]} is fainter than ${order[n - 1]}`);
          }
          const apart = Math.abs(order[0][1] - order[order.length - 1][1]);
          if (order[0][0] * 3 < order[order.length - 1][0] && apart < 0.2) faults.push(`${scale}: little and much look the same`);
        }
        if (classes() !== before) faults.push("there and back again, the map is another");
        const title = (n) => cells[n][2].querySelector("title").textContent;
        return faults.length ? faults.slice(0, 20) : [0, cells.length >> 1, cells.length - 1].map((n) => [title(n), wanted[n][2]]);
        "##
            .replace("DARK", if dark { "true" } else { "false" })
            .as_str(),
        )
        .unwrap();
    for cell in found.as_array().unwrap() {
        let [Value::String(title), bytes] = cell.as_array().map_or(&[][..], Vec::as_slice) else {
            panic!("{what}: {found:#}");
        };
        let words: Vec<&str> = title.split(' ').collect();
        let size = words[words.len() - 2..].join(" ");
        assert_shown(&size, bytes.as_f64().unwrap(), "size", what);
    }
}

/// Each figure is the number that the embedded JSON has at its path, and its text is that number in words.
fn figures(browser: &Browser, name: &str, answer: &Answer) {
    let found = browser
        .run(
            r#"
        const data = JSON.parse(document.getElementById("answer").textContent);
        const at = (path) => path.split(".").reduce((value, key) => value[key], data);
        return [...document.querySelectorAll("[data-path], [data-sum], [data-ratio]")].map((element) => {
          const { path, sum, ratio, value, as } = element.dataset;
          let wanted;
          if (path) wanted = at(path);
          if (sum) wanted = at(sum).reduce((a, b) => a + b, 0);
          if (ratio) wanted = ratio.split(" ").map(at).reduce((a, b) => a / b);
          return [path || sum || ratio, as, wanted, JSON.parse(value), wanted === JSON.parse(value), element.textContent];
        });
        "#,
        )
        .unwrap();
    let figures = found.as_array().unwrap();
    assert!(figures.len() > 30, "{name}: {} figures", figures.len());
    for figure in figures {
        let [path, kind, wanted, value, same, text] = figure.as_array().unwrap().as_slice() else { panic!("{figure}") };
        assert_eq!(same, true, "{name}: {path} is {wanted}, shown as {value}");
        let what = format!("{name}: {path}");
        assert_shown(text.as_str().unwrap(), value.as_f64().unwrap(), kind.as_str().unwrap(), &what);
    }
    // The page embeds the answer that it was given.
    let at = |path: &str| figures.iter().find(|f| f[0] == path).map(|f| f[2].clone());
    assert_eq!(at("requests.all"), Some(answer.requests.all.into()), "{name}");
    assert_eq!(at("requests.delivered"), Some(answer.requests.delivered.into()), "{name}");
    for (n, times) in answer.times.iter().enumerate().filter(|(_, t)| t.count > 0) {
        for (key, value) in [("p50", times.p50), ("p90", times.p90), ("p99", times.p99), ("max", times.max)] {
            // Not every reader of JSON rounds the last digit of a float as its writer did.
            let shown = at(&format!("times.{n}.{key}")).and_then(|v| v.as_f64()).unwrap();
            assert!((shown - value).abs() <= value * 1e-12, "{name}: {} is {value}, not {shown}", times.name);
        }
    }
    // A row and a column of the table of times say what the path does.
    let table = browser
        .run(
            r#"
        const data = JSON.parse(document.getElementById("answer").textContent);
        const names = { Requests: "count", Mean: "mean", p50: "p50", p90: "p90", p99: "p99", Most: "max" };
        const faults = [];
        for (const table of document.querySelectorAll("table.times")) {
          const columns = [...table.tHead.rows[0].cells].map((c) => c.textContent);
          [...table.tBodies[0].rows].forEach((row, n) => {
            if (row.cells[0].firstChild.textContent !== data.times[n].name && TAME) faults.push(row.cells[0].textContent);
            [...row.cells].forEach((cell, c) => {
              const figure = cell.querySelector("[data-path]");
              if (figure && figure.dataset.path !== `times.${n}.${names[columns[c]]}`) faults.push(figure.dataset.path);
            });
          });
        }
        return faults;
        "#
            .replace("TAME", if name == "hostile" { "false" } else { "true" })
            .as_str(),
        )
        .unwrap();
    assert_eq!(table, Value::Array(Vec::new()), "{name}");
}

/// Whether a text says a number: to three digits in its unit, and a count to the last.
fn assert_shown(text: &str, value: f64, kind: &str, what: &str) {
    const UNITS: [(&str, &str, f64); 22] = [
        ("time", "ns", 1e-9),
        ("time", "µs", 1e-6),
        ("time", "ms", 1e-3),
        ("time", "s", 1.0),
        ("share", "%", 0.01),
        ("size", "B", 1.0),
        ("size", "KiB", 1024.0),
        ("size", "MiB", 1_048_576.0),
        ("size", "GiB", 1_073_741_824.0),
        ("size", "TiB", 1_099_511_627_776.0),
        ("size", "PiB", 1_125_899_906_842_624.0),
        ("rate", "B/s", 1.0),
        ("rate", "kB/s", 1e3),
        ("rate", "MB/s", 1e6),
        ("rate", "GB/s", 1e9),
        ("rate", "TB/s", 1e12),
        ("work", "/s", 1.0),
        ("work", "k/s", 1e3),
        ("work", "M/s", 1e6),
        ("work", "G/s", 1e9),
        ("count", "", 1.0),
        ("plain", "", 1.0),
    ];
    let text = text.replace('\u{a0}', " ").replace(',', "");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let (_, _, scale) = UNITS
        .iter()
        .find(|(k, u, _)| *k == kind && *u == unit.trim())
        .unwrap_or_else(|| panic!("{what}: {text} has no unit of {kind}"));
    let shown = number.parse::<f64>().unwrap_or_else(|e| panic!("{what}: {text}: {e}")) * scale;
    let room = if matches!(kind, "count" | "plain") { 0.0 } else { value * 0.005_01 + 0.005_01 * scale };
    assert!((shown - value).abs() <= room, "{what}: {text} is not {value}");
}

/// No name became markup or script.
fn safety(browser: &Browser, name: &str, answer: &Answer) {
    let found = browser
        .run(
            r#"
        const data = JSON.parse(document.getElementById("answer").textContent);
        return [document.title, document.scripts.length, data.scenario, document.querySelector("h1").textContent];
        "#,
        )
        .unwrap();
    let [title, scripts, scenario, heading] = found.as_array().unwrap().as_slice() else { panic!("{found}") };
    assert!(title.as_str().unwrap().ends_with(" · kvferry"), "{name}: {title}");
    assert_eq!(scripts, 2, "{name}");
    assert_eq!(scenario, answer.scenario.as_str(), "{name}");
    assert!(!heading.as_str().unwrap().chars().any(char::is_control), "{name}: {heading}");
    // The policy lets nothing else run.
    let ran = browser
        .run(
            r#"
        const script = document.createElement("script");
        script.textContent = "window.taken = true";
        document.body.append(script);
        const style = document.createElement("p");
        style.setAttribute("onclick", "window.taken = true");
        document.body.append(style);
        style.click();
        script.remove();
        style.remove();
        return Boolean(window.taken);
        "#,
        )
        .unwrap();
    assert_eq!(ran, false, "{name}");
    let complaints = browser.complaints().unwrap();
    assert!(
        complaints.len() == 2 && complaints.iter().all(|c| c.contains("Content Security Policy")),
        "{complaints:#?}"
    );
}

/// Titles come at once, keys move over the map, and afterwards all is as it was.
fn comfort(browser: &Browser, name: &str) {
    let found = browser
        .run(
            r#"
        const data = JSON.parse(document.getElementById("answer").textContent);
        const heat = document.getElementById("heat");
        if (!heat) return [];
        const faults = [];
        const tip = document.getElementById("tip");
        const titles = () => document.querySelectorAll("svg title").length;
        const before = titles();
        const [row, column] = data.traffic.cells[0];
        const cell = heat.querySelector("rect");
        const names = [data.traffic.rows[row], data.traffic.columns[column]];
        cell.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 50, clientY: 50 }));
        if (tip.hidden || !names.every((n) => tip.textContent.includes(n))) faults.push(`by pointer: ${tip.textContent}`);
        document.body.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
        if (!tip.hidden || titles() !== before) faults.push("the pointer left something");
        heat.focus();
        if (document.activeElement !== heat) faults.push("the map can't be reached");
        for (const [key, times] of [["ArrowDown", 200], ["ArrowRight", 200], ["ArrowUp", 200], ["ArrowLeft", 200]]) {
          for (let n = 0; n < times; n++) heat.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        }
        const first = row === 0 && column === 0;
        if (first && (tip.hidden || !names.every((n) => tip.textContent.includes(n)))) faults.push(`by keys: ${tip.textContent}`);
        heat.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
        if (!tip.hidden || titles() !== before) faults.push("the keys left something");
        return faults;
        "#,
        )
        .unwrap();
    assert_eq!(found, Value::Array(Vec::new()), "{name}");
}
