//! Text and page of answers that are made up: whole, of bounded size, and with no name taken for anything but a name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use kvferry_topology::answer::{Answer, LinkUse, Times};
use kvferry_topology::report::{page, text};

mod sample;

fn samples() -> [(&'static str, Answer); 6] {
    use sample::{analytic, empty, failing, hostile, nodes, ranks};
    [
        ("ranks", ranks()),
        ("nodes", nodes()),
        ("failing", failing()),
        ("analytic", analytic()),
        ("empty", empty()),
        ("hostile", hostile()),
    ]
}

/// What a page embeds.
fn embedded(page: &str) -> &str {
    let begin = "<script type=\"application/json\" id=\"answer\">";
    page.split_once(begin).unwrap().1.split_once("</script>").unwrap().0
}

/// A page without what it embeds.
fn shown(page: &str) -> String {
    page.replace(embedded(page), "")
}

#[test]
fn lines_are_short_and_hold_no_control_characters() {
    for (name, answer) in samples() {
        let text = text(&answer);
        assert!(text.ends_with('\n') && !text.ends_with("\n\n"), "{name}");
        for line in text.lines() {
            assert!(line.chars().count() <= 110, "{name}: {line}");
            assert!(!line.chars().any(|c| c.is_control() || c == '\u{202e}' || c == '\u{2028}'), "{name}: {line:?}");
        }
    }
}

#[test]
fn text_says_what_happened() {
    let words = |text: &str| {
        text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ") + "\n").collect::<String>()
    };
    let ranks = words(&text(&sample::ranks()));
    for part in [
        "Llama-3.1-70B, 8 x TP 8 to 16 x TP 4\n",
        "events engine, seed 20261130, mode pull, stream = \"layers\", 3,541 s from",
        "\nP 8 of 8 64 tp=8 llama-3.1-70b ",
        "12,031 requests: 12,031 delivered (100 %), 25.8 TiB over the wire for 25.5 TiB delivered\n",
        "\nhandover 12,031 41.1 ms 31.4 ms 107 ms 286 ms 776 ms\n",
        "\nhandover, pull 12,031 603 ms 460 ms 1.56 s 4.19 s 11.4 s\n",
        "\nand 54 more links\n",
        "\nand 54 more ranks\n",
        "\nand 1,014 more pairs\n",
        "\n47,305,920 with nothing joined, 364,644 as given,\nof 64 requests that were measured, blocks in order\n",
        "\n17 requests waited for room\n",
    ] {
        assert!(ranks.contains(part), "{part:?} is not in\n{ranks}");
    }
    let failing = words(&text(&sample::failing()));
    for part in [
        "1,000 requests: 613 delivered (61.3 %)",
        "\nfailed: D had no room for the prompt (46)\n",
        "\nwarning: pool-small\n17 requests waited for room at D.\nchange: Raise D's blocks from 2,048",
        " 100 % ████████████████████ hot\n",
    ] {
        assert!(failing.contains(part), "{part:?} is not in\n{failing}");
    }
    assert!(text(&sample::empty()).contains("\n0 requests: 0 delivered (-)"));
    assert!(text(&sample::nodes()).contains("the 4,096 with the most bytes are listed, of 1,048,576 in all"));
}

#[test]
fn a_peak_that_nobody_knows_is_no_number() {
    let answer = sample::analytic();
    let (page, text) = (page(&answer), text(&answer));
    let links: Vec<_> = text.lines().skip_while(|l| !l.starts_with("fullest links")).skip(1).take(5).collect();
    for line in links {
        let words: Vec<_> = line.split_whitespace().collect();
        assert!(words.windows(2).any(|w| w == ["%", "-"]), "{line}");
    }
    let shown = shown(&page);
    assert!(embedded(&page).contains("\"peak\":null") && !shown.contains("links.0.peak"));
    assert!(shown.contains("Links, the fullest on average first; this engine knows no peaks"));
    // An answer from before they could be missing.
    let before = embedded(&page).replace("\"peak\":null,", "");
    assert_eq!(serde_json::from_str::<Answer>(&before).unwrap().links[0].peak, None);
}

/// However idle a link is, the curve of its use is as high as there is room.
#[test]
fn a_curve_over_time_is_as_high_as_its_peak() {
    let mut answer = sample::ranks();
    answer.links[3].over_time = vec![0.0, 0.0005, 0.001, 0.0005];
    let page = page(&answer);
    let curves: Vec<&str> = page.split("<svg class=\"spark\"").skip(1).collect();
    assert_eq!(curves.len(), 24);
    assert!(curves.iter().all(|c| c.split("</svg>").next().is_some_and(|c| c.contains("V0.0h"))));
    assert!(
        curves[3].contains("up to 0.1 %") && curves[3].contains("V10.0h30.000V0.0h30.000V10.0h30.000"),
        "{}",
        &curves[3][..400]
    );
}

#[test]
fn a_page_asks_for_nothing_and_stays_small() {
    for (name, answer) in samples() {
        let page = page(&answer);
        assert!(page.len() < 1_500_000, "{name}: {} bytes", page.len());
        let shown = shown(&page);
        for word in
            ["http://", "https://", "url(", "@import", " src=", "<link", "<img", "<iframe", "style=", "unsafe-inline"]
        {
            assert!(!shown.contains(word), "{name} has {word}");
        }
        assert!(shown.contains("content=\"default-src 'none'; style-src 'sha256-"), "{name}");
        assert_eq!(shown.matches("<script").count(), 2, "{name}");
        let handlers = [" onload=\"", " onclick=", " onerror="];
        assert!(handlers.iter().all(|h| !shown.contains(h)), "{name}");
    }
}

#[test]
fn a_page_embeds_the_answer_as_it_is() {
    for (name, answer) in samples() {
        let page = page(&answer);
        let json = embedded(&page);
        assert!(!json.contains(['<', '>', '&', '\u{2028}', '\u{2029}']), "{name}");
        let back: Answer = serde_json::from_str(json).unwrap();
        let text =
            |value: &dyn Fn(&Answer) -> serde_json::Value| (value(&answer).to_string(), value(&back).to_string());
        let whole = text(&|a| {
            serde_json::json!([
                a.scenario,
                a.engine,
                a.seed,
                a.prefill,
                a.decode,
                a.mode,
                a.stream,
                a.requests,
                a.traffic.cells,
                a.traffic.rows,
                a.traffic.columns,
                a.traffic.all_pairs,
                a.descriptors,
                a.pools,
                a.warnings,
                a.cost,
            ])
        });
        assert_eq!(whole.0, whole.1, "{name}");
        for (times, same) in answer.times.iter().zip(&back.times) {
            assert_eq!((&times.name, times.count), (&same.name, same.count), "{name}");
            // A reader of JSON may round the last digit of a float otherwise.
            assert!((times.p99 - same.p99).abs() <= times.p99 * 1e-12, "{name}: {}", times.name);
        }
        assert_eq!(answer.times.len(), back.times.len(), "{name}");
        let links = answer.links.iter().zip(&back.links).all(|(a, b)| a.name == b.name && a.bytes == b.bytes);
        assert!(links && back.links.len() == answer.links.len().min(24), "{name}");
        let most = answer.traffic.pairs.iter().map(|p| p.bytes).max();
        assert_eq!(back.traffic.pairs.first().map(|p| p.bytes), most, "{name}");
    }
}

#[test]
fn a_name_is_never_markup() {
    let (page, clean) = (page(&sample::hostile()), page(&sample::failing()));
    let (page, clean) = (shown(&page), shown(&clean));
    assert!(!page.contains("' onload=alert") && !page.contains("\" onload=alert"));
    // Names change no tag: there are as many of each as with names that mean no harm, but for the row that is more.
    for tag in ["<script", "<style", "</script", "<!--", "<title>", "<svg", "<section", "<table", "<caption"] {
        let (bad, good) = (page.matches(tag).count(), clean.matches(tag).count());
        let fewer = matches!(tag, "<svg" | "<title>") && bad <= good;
        assert!(bad == good || fewer, "{tag}: {bad} and {good}");
    }
    assert!(!page.chars().any(|c| (c.is_control() && c != '\n') || matches!(c, '\u{202e}' | '\u{2028}')));
    assert!(page.contains("&lt;/script&gt;&lt;script&gt;document.title=&#39;taken&#39;"));
}

#[test]
fn a_map_of_more_than_can_be_drawn_is_folded_and_loses_no_byte() {
    let mut answer = sample::ranks();
    let names = |side: &str, n: u32| (0..n).map(|i| format!("{side}{i}")).collect::<Vec<_>>();
    answer.traffic.rows = names("P", 1000);
    answer.traffic.columns = names("D", 129);
    answer.traffic.cells = (0..1000).map(|n| (n, n * 7 % 129, u64::from(n) + 1)).collect();
    // A cell outside of the map, one of nothing, and one that comes twice.
    answer.traffic.cells.extend([(1000, 0, 5), (0, 129, 5), (3, 3, 0), (0, 0, 41)]);
    let page = page(&answer);
    let back: Answer = serde_json::from_str(embedded(&page)).unwrap();
    let traffic = &back.traffic;
    assert_eq!((traffic.rows.len(), traffic.columns.len()), (125, 65));
    assert_eq!((traffic.rows[0].as_str(), traffic.rows_are.as_str()), ("P0 to P7", "8 ranks"));
    assert_eq!((traffic.columns[64].as_str(), traffic.columns_are.as_str()), ("D128", "2 ranks"));
    assert_eq!(traffic.cells.iter().map(|c| c.2).sum::<u64>(), 1000 * 1001 / 2 + 41);
    let mut slow = vec![vec![0u64; 65]; 125];
    for (row, column, bytes) in answer.traffic.cells.iter().filter(|c| c.0 < 1000 && c.1 < 129) {
        slow[*row as usize / 8][*column as usize / 2] += bytes;
    }
    let wanted: Vec<_> = (0u32..)
        .zip(&slow)
        .flat_map(|(r, row)| (0u32..).zip(row).filter(|(_, b)| **b > 0).map(move |(c, b)| (r, c, *b)))
        .collect();
    assert_eq!(traffic.cells, wanted);
}

#[test]
fn no_number_makes_a_page_or_a_table_fail() {
    let wild = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 0.0, f64::MIN_POSITIVE, 1e-30, 1e300, f64::MAX];
    for value in wild {
        let mut answer = sample::failing();
        answer.span = value;
        for times in &mut answer.times {
            (times.mean, times.p50, times.p90, times.p99, times.max) = (value, value, value, value, value);
            times.bars = vec![(value, u64::MAX), (value, 1), (1.0, u64::MAX), (0.5, 3)];
        }
        #[allow(clippy::cast_possible_truncation, reason = "any number will do")]
        for link in &mut answer.links {
            (link.capacity, link.mean, link.peak, link.bytes) = (value, value, Some(value), u64::MAX);
            link.over_time = vec![value as f32; 3];
        }
        for bar in answer.gantt.iter_mut().flat_map(|g| &mut g.rows).flat_map(|r| &mut r.bars) {
            (bar.0, bar.1) = (value, -value);
        }
        answer.descriptors.before = vec![u64::MAX; 40];
        answer.descriptors.sizes = vec![u64::MAX; 20];
        answer.pools.used = vec![u64::MAX; 3];
        answer.pools.capacity = u64::MAX;
        answer.traffic.cells = vec![(0, 0, u64::MAX), (1, 1, 1), (0, 0, u64::MAX)];
        let (page, text) = (page(&answer), text(&answer));
        let shown = shown(&page);
        for word in ["NaN", "inf%", "\"inf", "nan"] {
            assert!(!shown.contains(word), "{value}: {word} in the page");
        }
        assert!(!text.contains("NaN") && !text.contains("inf "), "{value}: {text}");
        assert!(text.lines().all(|l| l.chars().count() <= 110), "{value}: {text}");
    }
}

#[test]
fn long_lists_and_long_names_keep_a_page_small() {
    let mut answer = sample::nodes();
    let long = "x".repeat(100_000);
    let bars: Vec<(f64, f64, String)> = (0..5000).map(|n| (f64::from(n), f64::from(n) + 0.5, "layer".into())).collect();
    let gantt = answer.gantt.as_mut().unwrap();
    gantt.rows = vec![kvferry_topology::answer::GanttRow { name: "r".into(), kind: "wire".into(), bars }; 300];
    answer.times = vec![Times { name: "t".into(), count: 1, bars: vec![(1.0, 1); 10_000], ..Times::default() }; 8];
    answer.links = vec![LinkUse { over_time: vec![0.5; 10_000], ..LinkUse::default() }; 3000];
    assert!(page(&answer).len() < 1_700_000, "{} bytes", page(&answer).len());
    answer.scenario = long.clone();
    answer.warnings.iter_mut().for_each(|w| w.text = long.clone());
    let shown = shown(&page(&answer));
    assert!(!shown.contains(&"x".repeat(2001)), "a long text was not cut");
    assert!(text(&answer).lines().all(|l| l.chars().count() <= 110));
}

#[test]
fn neighbours_in_a_long_row_of_a_gantt_are_joined_and_its_end_stays() {
    let mut answer = sample::ranks();
    let gantt = answer.gantt.as_mut().unwrap();
    let bars: Vec<(f64, f64, String)> =
        (0..61).map(|n| (f64::from(n), f64::from(n) + 0.9, format!("layer {n}"))).collect();
    gantt.rows = (0..64)
        .map(|n| kvferry_topology::answer::GanttRow { name: format!("r{n}"), kind: "wire".into(), bars: bars.clone() })
        .collect();
    let back: Answer = serde_json::from_str(embedded(&page(&answer))).unwrap();
    let row = &back.gantt.unwrap().rows[63];
    // 1,000 bars for 64 rows are 15 for each, so five of 61 go together.
    assert_eq!(row.bars.len(), 13);
    assert_eq!(row.bars[0], (0.0, 4.9, "layer 0 to layer 4".to_owned()));
    assert_eq!(row.bars[12], (60.0, 60.9, "layer 60".to_owned()));
}

#[test]
fn the_same_answer_is_always_the_same_page() {
    assert_eq!(page(&sample::ranks()), page(&sample::ranks()));
    assert_ne!(page(&sample::ranks()), page(&sample::failing()));
}
