//! Traces: what is read, what is told of what can't be, and that nothing can be fed to the reader that it doesn't survive.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

use std::io::{BufReader, Read};
use std::path::Path;
use std::time::Duration;

use kvferry_sim::rng::Rng;
use kvferry_topology::load::fault::LISTED;
use kvferry_topology::load::trace::{Format, MAX_BYTES, MAX_LINE, TraceOptions, read};
use kvferry_topology::load::{Fault, Load, LoadErrors, LoadTable, MAX_REQUESTS, Prefix, date};

fn data(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    std::fs::read_to_string(path).unwrap()
}

fn all(text: &str) -> Result<Load, LoadErrors> {
    read("trace", text.as_bytes(), &TraceOptions::default())
}

fn told(text: &str) -> String {
    all(text).unwrap_err().to_string()
}

fn plain(load: &Load) -> Vec<(f64, u64, u64)> {
    load.requests.iter().map(|r| (r.at.as_secs_f64(), r.prompt, r.output)).collect()
}

#[test]
fn our_csv_is_read() {
    let load = all(&data("load-own.csv")).unwrap();
    assert_eq!(plain(&load), [(0.0, 1200, 80), (0.25, 4096, 1), (0.5, 300, 20), (2.0, 65536, 500)]);
    let hits: Vec<_> = load.requests.iter().map(|r| r.prefix.clone()).collect();
    let hit = |prefill, decode| Prefix::Hit { prefill, decode };
    assert_eq!(hits, [Prefix::None, hit(1024, 0), hit(0, 0), hit(65000, 32768)]);
    assert!(load.notes.is_empty());
    // Columns in another order, without hits, with blanks and quotes, a byte-order mark and the other line ends.
    let text = "\u{feff}output, at_s ,\"prompt\"\r\n5,1.5,\"100\"\r\n\r\n 6 ,2.5, 200 ";
    assert_eq!(plain(&all(text).unwrap()), [(0.0, 100, 5), (1.0, 200, 6)]);
}

#[test]
fn our_json_lines_are_read() {
    let load = all(&data("load-own.jsonl")).unwrap();
    assert_eq!(plain(&load), [(0.0, 1100, 30), (0.5, 1500, 40), (1.75, 64, 8), (2.0, 2000, 5)]);
    let blocks = |ids: [u64; 3]| Prefix::Blocks { ids: ids.into(), tokens: 512 };
    let prefixes: Vec<_> = load.requests.iter().map(|r| r.prefix.clone()).collect();
    let hit = Prefix::Hit { prefill: 512, decode: 0 };
    assert_eq!(prefixes, [blocks([11, 12, 13]), blocks([11, 12, 14]), Prefix::None, hit]);
}

#[test]
fn mooncake_is_read_and_put_in_order() {
    let load = all(&data("load-mooncake.jsonl")).unwrap();
    assert_eq!(plain(&load), [(0.0, 1500, 10), (0.0, 1024, 200), (0.6, 100, 7), (0.75, 2100, 1)]);
    assert_eq!(
        load.notes,
        [
            "put in order of time: 1 of its requests stood after a later one",
            "requests without output, taken to have one token: 1",
        ]
    );
    assert_eq!(load.span(), Duration::from_millis(750));
    assert_eq!((load.prompt_tokens(), load.output_tokens()), (4724, 218));
    // The second has all of its blocks, the fourth has two.
    assert!((load.hit_rate(None) - 2048.0 / 4724.0).abs() < 1e-12);
    assert!((load.hit_rate(Some(0))).abs() < 1e-12);
}

#[test]
fn azure_is_read_over_the_turn_of_a_year() {
    let load = all(&data("load-azure.csv")).unwrap();
    let at: Vec<u128> = load.requests.iter().map(|r| r.at.as_nanos()).collect();
    assert_eq!(at, [0, 750_000_000, 60_500_000_100]);
    assert_eq!((load.requests[1].prompt, load.requests[1].output), (1900, 160));
    // As later releases write it, with further columns.
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens,Model\n2024-05-10 00:00:00.009930+00:00,2162,5,a\n2024-05-10T02:00:01.009930+02:00,9,9,b\n";
    assert_eq!(plain(&all(text).unwrap()), [(0.0, 2162, 5), (1.0, 9, 9)]);
}

#[test]
fn parts_and_other_speeds() {
    let text = data("load-own.csv");
    let some = |options: &TraceOptions| plain(&read("t", text.as_bytes(), options).unwrap());
    let all = TraceOptions::default();
    assert_eq!(some(&TraceOptions { first: 1, limit: 2, ..all.clone() }), [(0.0, 4096, 1), (0.25, 300, 20)]);
    assert_eq!(some(&TraceOptions { first: 2, speed: 0.5, ..all.clone() }), [(0.0, 300, 20), (3.0, 65536, 500)]);
    let error = read("t", text.as_bytes(), &TraceOptions { first: 4, ..all.clone() }).unwrap_err();
    assert_eq!(error.to_string(), "t: is missing; the trace has 4 requests, and `load.first` leaves out 4");
    // What comes after the limit is not looked at.
    let text = format!("{text}nonsense\n");
    assert!(read("t", text.as_bytes(), &TraceOptions { limit: 4, ..all.clone() }).is_ok());
    assert!(read("t", text.as_bytes(), &TraceOptions { limit: 5, ..all.clone() }).is_err());
    // The same for JSON lines, whose first line is a request.
    let text = data("load-own.jsonl");
    let load = read("t", text.as_bytes(), &TraceOptions { first: 1, limit: 1, ..all }).unwrap();
    assert_eq!(plain(&load), [(0.0, 1500, 40)]);
}

#[test]
fn every_fault_is_told_with_its_line() {
    assert_eq!(
        told("at_s,prompt,output,prefill_hit\n0,10,1,0\n1,0,1,0\nx,1.5,,0\n2,10,1\n3,20,30,21\n-1,7,16777217,\n"),
        "trace:3: prompt: is 0; it must be 1 to 16777216\n\
         trace:4: at_s: \"x\" is not a number of seconds\n\
         trace:4: prompt: \"1.5\" is not a whole number of tokens\n\
         trace:4: output: \"\" is not a whole number of tokens\n\
         trace:5: has 3 fields, but the header has 4\n\
         trace:6: prefill_hit: is 21, more than the 20 tokens of the prompt\n\
         trace:7: at_s: is -1; it must be 0 to 1000000000\n\
         trace:7: output: is 16777217; it must be 0 to 16777216"
    );
    assert_eq!(
        told("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-31 00:00:00,5,5\n2023-11-16 24:00:00,5,5\n"),
        "trace:2: TIMESTAMP: \"2023-11-31 00:00:00\" is not a date and time as 2023-11-16 18:15:46.6805900\n\
         trace:3: TIMESTAMP: \"2023-11-16 24:00:00\" is not a date and time as 2023-11-16 18:15:46.6805900"
    );
    let json = "{\"timestamp\":1,\"input_length\":513,\"output_length\":1,\"hash_ids\":[1,2,3]}\n{\"timestamp\":1}\n\
                {\"timestamp\":1,\"input_length\":-5,\"output_length\":1}\n[1, 5, 5, []]\n";
    assert_eq!(
        told(json),
        "trace:1: hash_ids: are 3 ids, but a prompt of 513 tokens has 2 blocks of 512; set `load.block_tokens`\n\
         trace:2: is not a request as JSON: missing field `input_length` (column 15)\n\
         trace:3: is not a request as JSON: invalid value: integer `-5`, expected u64 (column 32)\n\
         trace:4: \"[1, 5, 5, []]\" is not a JSON object"
    );
    let own = "{\"at_s\":0,\"prompt\":9,\"output\":1,\"blocks\":[1],\"prefill_hit\":1}\n{\"at_s\":1e10,\"prompt\":9,\"output\":1}\n\
               {\"at_s\":0,\"prompt\":9,\"output\":1,\"block\":[1]}\n";
    let text = told(own);
    assert!(text.starts_with("trace:1: blocks: stand beside a hit"), "{text}");
    assert!(text.contains("trace:2: at_s: is 10000000000; it must be 0 to 1000000000\n"), "{text}");
    assert!(text.contains("trace:3: is not a request as JSON: unknown field `block`"), "{text}");
}

#[test]
fn the_first_faults_are_listed_and_the_others_counted() {
    let rows: String = (0..57).map(|i| format!("{i},0,1\n")).collect();
    let errors = all(&format!("at_s,prompt,output\n0,1,1\n{rows}9,9,9\n")).unwrap_err();
    assert_eq!((errors.faults.len(), errors.more), (LISTED, 57 - LISTED as u64));
    assert_eq!(errors.faults[0].line, Some(3));
    assert!(errors.to_string().ends_with("\nand 37 more faults"));
}

#[test]
fn headers_and_formats() {
    let header = |text: &str| told(&format!("{text}\n1,2,3\n"));
    assert_eq!(header("at_s,prompt"), "trace:1: output: is missing; the header is at_s,prompt");
    assert_eq!(header("at_s,prompt,output,prompt"), "trace:1: prompt: stands in the header twice");
    assert_eq!(header("at_s,prompt,output,tail"), "trace:1: tail: is no column of ours; leave it out");
    assert!(header("a,b,c").contains("\"a,b,c\" is not the beginning of a known trace; see `load.format`"));
    assert_eq!(told(""), "trace: is missing; the trace has no request");
    assert_eq!(told("at_s,prompt,output\n"), "trace: is missing; the trace has no request");
    let many = vec!["at_s"; 70].join(",");
    assert!(header(&many).contains("more than 64 columns"));
    // A format that is named is not looked for.
    let options = TraceOptions { format: Some(Format::Csv), ..TraceOptions::default() };
    let errors = read("t", data("load-azure.csv").as_bytes(), &options).unwrap_err().to_string();
    assert!(errors.contains("t:1: TIMESTAMP: is no column of ours"), "{errors}");
    for (word, format) in
        [("mooncake", Format::Mooncake), ("azure", Format::Azure), ("csv", Format::Csv), ("jsonl", Format::Jsonl)]
    {
        assert_eq!(Format::named(word), Some(format));
        assert!(Format::KNOWN.contains(word));
    }
    assert_eq!(Format::named("auto"), None);
}

#[test]
fn what_is_too_long_or_no_text_is_refused() {
    let gzip = read("t.gz", [0x1f_u8, 0x8b, 8, 0].as_slice(), &TraceOptions::default()).unwrap_err();
    assert_eq!(gzip, LoadErrors::of_file("t.gz", Fault::Compressed).at_line(1));
    let long = format!("at_s,prompt,output\n0,1,1{}\n1,1,x\n", " ".repeat(MAX_LINE));
    let text = told(&long);
    assert!(text.starts_with("trace:2: there are more than 1048576 bytes in the line"), "{text}");
    assert!(text.contains("\ntrace:3: output: "), "what follows is looked at: {text}");
    let bytes = b"at_s,prompt,output\n0,1,1\n\xff\n";
    let error = read("t", bytes.as_slice(), &TraceOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), "t:3: is not UTF-8 text");
    // A line without end does not fill the memory, nor does a file without end.
    let endless = BufReader::new(std::io::repeat(b'7'));
    let error = read("t", endless, &TraceOptions::default()).unwrap_err();
    assert!(error.to_string().contains(&format!("more than {MAX_BYTES} bytes")), "{error}");
    let rows = BufReader::new("at_s,prompt,output\n".as_bytes().chain(Again(b"0,1,1\n", 0)));
    let error = read("t", rows, &TraceOptions::default()).unwrap_err();
    assert!(error.to_string().contains(&format!("more than {MAX_REQUESTS} requests")), "{error}");
}

/// The same bytes again and again.
struct Again(&'static [u8], usize);

impl Read for Again {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        for byte in out.iter_mut() {
            *byte = self.0[self.1 % self.0.len()];
            self.1 += 1;
        }
        Ok(out.len())
    }
}

/// A line in an expectation.
trait AtLine {
    fn at_line(self, line: u64) -> Self;
}

impl AtLine for LoadErrors {
    fn at_line(mut self, line: u64) -> Self {
        self.faults[0].line = Some(line);
        self
    }
}

#[test]
fn what_is_written_is_read() {
    for seed in 0..200 {
        let mut rng = Rng::of(&[seed]);
        let (mut csv, mut jsonl) = (String::from("prompt,decode_hit,output,at_s,prefill_hit\n"), String::new());
        let mut expected = Vec::new();
        let mut at = 0;
        for _ in 0..rng.between(1, 40) {
            at += rng.below(5_000);
            let (prompt, output) = (rng.between(1, 1 << 24), rng.between(1, 1 << 24));
            let (prefill, decode) = (rng.between(0, prompt), rng.between(0, prompt));
            let time = format!("{}.{:03}", at / 1000, at % 1000);
            csv += &format!("{prompt},{decode},{output},{time},{prefill}\n");
            jsonl += &format!(
                "{{\"prompt\":{prompt},\"decode_hit\":{decode},\"output\":{output},\"at_s\":{time},\"prefill_hit\":{prefill}}}\n"
            );
            expected.push((at, prompt, output, Prefix::Hit { prefill, decode }));
        }
        let begin = expected[0].0;
        let [csv, jsonl] = [csv, jsonl].map(|text| all(&text).unwrap());
        assert_eq!(csv, jsonl);
        for (got, (at, prompt, output, prefix)) in csv.requests.iter().zip(&expected) {
            assert_eq!(got.at, Duration::from_millis(at - begin));
            assert_eq!((got.prompt, got.output, &got.prefix), (*prompt, *output, prefix));
        }
        assert_eq!(csv.requests.len(), expected.len());
    }
}

#[test]
fn nothing_that_is_read_makes_it_panic() {
    let texts = ["load-own.csv", "load-own.jsonl", "load-mooncake.jsonl", "load-azure.csv"].map(data);
    let (mut taken, mut refused) = (0, 0);
    for seed in 0..6_000 {
        let mut rng = Rng::of(&[seed, 7]);
        let mut bytes = rng.pick(&texts).unwrap().clone().into_bytes();
        for _ in 0..rng.between(1, 3) {
            let at = rng.below(bytes.len() as u64) as usize;
            match rng.below(8) {
                _ if bytes.is_empty() => break,
                0 => bytes[at] = rng.below(256) as u8,
                1 => drop(bytes.remove(at)),
                2 => bytes.insert(at, *rng.pick(b"-09,.:{}[]\"eE\n ").unwrap()),
                3 => bytes.truncate(at.max(1)),
                _ if bytes[at].is_ascii_digit() => bytes[at] = b'0' + rng.below(10) as u8,
                _ => {}
            }
        }
        match read("t", bytes.as_slice(), &TraceOptions::default()) {
            Ok(load) => {
                taken += 1;
                assert!(!load.requests.is_empty());
                assert!(load.requests.windows(2).all(|w| w[0].at <= w[1].at));
                assert!(load.requests.iter().all(|r| r.prompt > 0 && r.output > 0));
            }
            Err(errors) => {
                refused += 1;
                assert!(!errors.faults.is_empty());
            }
        }
    }
    assert!(taken > 500 && refused > 500, "{taken} {refused}");
}

#[test]
fn dates_are_counted_day_by_day() {
    let leap = |y: u32| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    let mut day: i64 = 0;
    for year in 1970..2262_u32 {
        let months = [31, if leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        for (month, days) in months.iter().enumerate() {
            for date in 1..=*days {
                let text = format!("{year}-{:02}-{date:02} 00:00:00", month + 1);
                assert_eq!(date::nanos(&text), Some(day * 86_400_000_000_000), "{text}");
                day += 1;
            }
            let beyond = format!("{year}-{:02}-{:02} 00:00:00", month + 1, days + 1);
            assert_eq!(date::nanos(&beyond), None, "{beyond}");
        }
    }
    let day = "2024-02-29";
    for (text, nanos) in [("23:59:59.999999999", 86_399_999_999_999_i64), ("01:02:03.04", 3_723_040_000_000)] {
        let begin = date::nanos("2024-02-29T00:00:00Z").unwrap();
        assert_eq!(date::nanos(&format!("{day} {text}")), Some(begin + nanos));
        assert_eq!(date::nanos(&format!("{day} {text}-01:30")), Some(begin + nanos + 5_400_000_000_000));
    }
    for bad in
        ["", "2024-02-29", "2024-02-29 1:00:00", "2024-02-29 00:60:00", "2024-02-29 00:00:00.", "2024-13-01 00:00:00"]
    {
        assert_eq!(date::nanos(bad), None, "{bad}");
    }
    for tail in [".0000000000", "+0100", "Zz", "+24:00", " UTC"] {
        assert_eq!(date::nanos(&format!("2024-02-29 00:00:00{tail}")), None, "{tail}");
    }
}

#[test]
fn a_trace_is_opened_from_the_scenarios_folder() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let spec = |text: &str| toml::from_str::<LoadTable>(text).unwrap().check().unwrap();
    let load = spec("trace = \"load-azure.csv\"\nspeed = 2\nprefill_hit = 0.5").draw(1, &dir).unwrap();
    assert_eq!(load.requests[1].at, Duration::from_millis(375));
    assert_eq!(load.requests[1].prefix, Prefix::Hit { prefill: 950, decode: 0 });
    // A trace's own hits and those of the scenario.
    let errors = spec("trace = \"load-own.csv\"\ndecode_hit = 0.5").draw(1, &dir).unwrap_err();
    assert_eq!(
        errors.to_string(),
        "load.decode_hit: is set, but load-own.csv tells itself what is cached; leave it out"
    );
    let errors = spec("trace = \"no-such.csv\"").draw(1, &dir).unwrap_err();
    assert!(errors.to_string().starts_with("no-such.csv: cannot be read: "), "{errors}");
    assert!(spec("trace = \".\"").draw(1, &dir).is_err());
}
