//! The table of cases in `docs/testing.md` is complete and true: every case stands in it once, every test it names
//! exists, and no test of a case is missing from it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// All cases by family.
const CASES: &[(&str, &[u32])] = &[
    ("GEO", &[1, 2, 5, 6, 7]),
    ("BLK", &[1, 2, 4]),
    ("PFX", &[1, 4, 5, 6, 7]),
    ("HMA", &[1, 2, 4]),
    ("MAM", &[1, 3, 4]),
    ("MLA", &[1, 3]),
    ("PP", &[1, 4, 5]),
    ("DCP", &[1, 3, 4]),
    ("REG", &[1, 3, 4, 5]),
    ("INT", &[1, 3, 5]),
    ("HS", &[1, 2, 4, 6, 8, 10, 11]),
    ("LS", &[2, 3, 4, 5, 7, 9, 10]),
    ("FR", &[1, 3, 5, 7, 9, 10, 11, 12, 13, 14, 15]),
    ("ID", &[1, 3, 4, 6]),
    ("RS", &[1, 4, 5]),
    ("SEC", &[1, 3]),
    ("UC", &[1, 2, 3, 4, 7, 8]),
    ("ME", &[1]),
    ("LK", &[1]),
];

/// One row: the case, the tests that show it as (file, function), and what the rest of it waits for.
#[derive(Debug)]
struct Row {
    case: String,
    tests: Vec<(String, String)>,
    waits: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the workspace").to_owned()
}

fn all_cases() -> Vec<String> {
    CASES.iter().flat_map(|(family, numbers)| numbers.iter().map(move |n| format!("{family}-{n:02}"))).collect()
}

/// Rows look like ``| GEO-01 | `cases_geo::geo_01_x`, `crates/x/src/y.rs::z` | what it waits for |``. A file without a
/// directory is one of `tests/tests`.
fn rows(text: &str) -> Vec<Row> {
    let is_case = |cell: &str| {
        let parts = cell.split_once('-');
        parts.is_some_and(|(family, n)| CASES.iter().any(|c| c.0 == family) && n.chars().all(|c| c.is_ascii_digit()))
    };
    let mut rows = Vec::new();
    for line in text.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", case, tests, waits, ""] = cells.as_slice() else { continue };
        if !is_case(case) {
            continue;
        }
        let tests = tests.split(',').map(str::trim).filter(|t| !t.is_empty()).map(|test| {
            let (file, name) = test.trim_matches('`').rsplit_once("::").unwrap_or_else(|| panic!("{case}: {test}"));
            let file = if file.contains('/') { file.to_owned() } else { format!("tests/tests/{file}.rs") };
            (file, name.to_owned())
        });
        rows.push(Row { case: (*case).to_owned(), tests: tests.collect(), waits: (*waits).to_owned() });
    }
    rows
}

fn table() -> Vec<Row> {
    let text = std::fs::read_to_string(root().join("docs/testing.md")).expect("docs/testing.md is there");
    rows(&text)
}

/// Names of the test functions of a file.
fn tests_of(text: &str) -> BTreeSet<String> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let is_test = |line: &str| line == "#[test]" || line.starts_with("#[tokio::test");
    let mut names = BTreeSet::new();
    for at in lines.iter().enumerate().filter(|(_, line)| is_test(line)).map(|(at, _)| at) {
        let function = lines[at..].iter().find_map(|l| l.strip_prefix("async ").unwrap_or(l).strip_prefix("fn "));
        names.extend(function.and_then(|f| f.split('(').next()).map(str::to_owned));
    }
    names
}

#[test]
fn every_case_stands_in_the_table_once() {
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    table().into_iter().for_each(|row| *count.entry(row.case).or_default() += 1);
    assert_eq!(all_cases().len(), 76);
    for case in all_cases() {
        assert_eq!(count.remove(&case), Some(1), "{case}: rows in docs/testing.md");
    }
    assert!(count.is_empty(), "rows of unknown cases: {count:?}");
}

#[test]
fn every_row_names_a_test_or_what_it_waits_for() {
    for row in table() {
        assert!(!row.tests.is_empty() || row.waits.len() > 3, "{}: neither a test nor what it waits for", row.case);
    }
}

#[test]
fn every_named_test_exists() {
    let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for row in table() {
        for (file, name) in row.tests {
            let found = files.entry(file.clone()).or_insert_with(|| {
                let text = std::fs::read_to_string(root().join(&file));
                tests_of(&text.unwrap_or_else(|e| panic!("{}: {file}: {e}", row.case)))
            });
            assert!(found.contains(&name), "{}: {file} has no test {name}", row.case);
        }
    }
}

/// Rust files under a directory, by path from the root.
fn rust_files(directory: &str, out: &mut Vec<String>) {
    for entry in std::fs::read_dir(root().join(directory)).expect("a directory of the workspace") {
        let entry = entry.expect("readable");
        let path = format!("{directory}/{}", entry.file_name().to_str().expect("a plain name"));
        if entry.file_type().expect("readable").is_dir() {
            rust_files(&path, out);
        } else if path.ends_with(".rs") {
            out.push(path);
        }
    }
}

/// The case that a test is named after: `geo_01_x` is of GEO-01.
fn case_of(test: &str) -> Option<String> {
    let mut words = test.splitn(3, '_');
    let (family, number, _) = (words.next()?, words.next()?, words.next()?);
    let case = format!("{}-{number}", family.to_uppercase());
    all_cases().contains(&case).then_some(case)
}

#[test]
fn every_test_of_a_case_is_in_its_row() {
    let rows = table();
    let mut files = Vec::new();
    ["crates", "tests/tests", "tests/src", "xtask/src"].iter().for_each(|d| rust_files(d, &mut files));
    let mut seen = 0;
    for file in files {
        for test in tests_of(&std::fs::read_to_string(root().join(&file)).expect("readable")) {
            let Some(case) = case_of(&test) else {
                assert!(!file.starts_with("tests/tests/cases_"), "{file}: {test} is not named after a case");
                continue;
            };
            let row = rows.iter().find(|r| r.case == case).expect("every case has a row");
            let listed = row.tests.contains(&(file.clone(), test.clone()));
            assert!(listed, "{file}: {test} is missing from the row of {case} in docs/testing.md");
            seen += 1;
        }
    }
    assert!(seen > 50, "only {seen} tests of cases found");
}

#[test]
fn the_reader_of_the_table_reads_it() {
    let text = "| case | shown by | waits for |\n|---|---|---|\n\
                | GEO-01 | `cases_geo::a`, `crates/x/src/y.rs::b` | |\n| UC-01 | | UCX backend |\n| XX-01 | | no |\n";
    let rows = rows(text);
    assert_eq!(rows.len(), 2, "{rows:?}");
    let own = |file: &str, name: &str| (file.to_owned(), name.to_owned());
    assert_eq!(rows[0].tests, [own("tests/tests/cases_geo.rs", "a"), own("crates/x/src/y.rs", "b")]);
    assert_eq!((rows[1].tests.len(), rows[1].waits.as_str()), (0, "UCX backend"));
    let source = "#[test]\nfn one() {}\nfn helper() {}\n#[test]\n#[should_panic]\nfn two() {}\n";
    assert_eq!(tests_of(source), BTreeSet::from(["one".to_owned(), "two".to_owned()]));
    let source = "#[tokio::test(flavor = \"x\")]\nasync fn three() {}\nasync fn helper() {}\n#[tokio::test]\nasync fn four() {}\n";
    assert_eq!(tests_of(source), BTreeSet::from(["four".to_owned(), "three".to_owned()]));
}
