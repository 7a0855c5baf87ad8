//! Plants small faults in a copy of the planner and checks that the property tests find each of them.
//!
//! Every `tests/mutants/*.patch` is one fault, as a unified diff against `crates/kvferry-geometry`. For each, a copy of
//! the planner, the oracle and the random engines is built and `tests/tests/planner.rs` is run: it must fail. A patch that
//! no longer applies or doesn't compile is an error and never counts as found. Without any fault the tests must pass.
//!
//! `mutants [NAME...]` plants only the faults whose file names contain one of the words. `PROPTEST_CASES` (2000 where it
//! isn't set) and `KVFERRY_SEED` are handed on.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// What is copied, from the root of the workspace.
const COPIED: &[&str] =
    &["crates/kvferry-geometry", "tests/oracle", "tests/src/random", "tests/tests/planner.rs", "Cargo.lock"];
/// A run that takes longer goes round in circles.
const LIMIT: Duration = Duration::from_secs(300);

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            say(&format!("mutants: {e}"));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<bool> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("no workspace around this package")?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let bench = Bench { root, tree: target.join("mutants/tree"), target: target.join("mutants/target") };
    let mut patches: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(root.join("tests/mutants"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".patch") && (words.is_empty() || words.iter().any(|w| name.contains(w.as_str()))) {
            patches.push(path);
        }
    }
    patches.sort();
    if patches.is_empty() {
        return Err("no patch in tests/mutants has such a name".into());
    }
    bench.lay_out()?;
    match bench.test()? {
        Seen::Passed => {}
        Seen::Failed(why) => return Err(format!("the tests fail without any fault: {why}").into()),
        Seen::Broken(why) => return Err(format!("the copy without any fault does not build:\n{why}").into()),
    }
    let (mut found, mut errors) = (0, 0);
    for patch in &patches {
        let name = patch.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let began = Instant::now();
        let seen = match bench.plant(patch) {
            Ok(()) => bench.test()?,
            Err(e) => Seen::Broken(e.to_string()),
        };
        let text = match seen {
            Seen::Failed(why) => {
                found += 1;
                format!("found      {name}: {why}")
            }
            Seen::Passed => format!("NOT FOUND  {name}"),
            Seen::Broken(why) => {
                errors += 1;
                format!("ERROR      {name}: {why}")
            }
        };
        say(&format!("{text} ({:.0} s)", began.elapsed().as_secs_f64()));
    }
    say(&format!("{} mutants, {found} found, {errors} errors", patches.len()));
    Ok(found == patches.len())
}

/// What a run of the tests shows.
enum Seen {
    Passed,
    /// The first line of the failure.
    Failed(String),
    /// The patch does not apply, or what it makes does not compile.
    Broken(String),
}

/// A copy of the planner and of what tests it.
struct Bench<'a> {
    root: &'a Path,
    tree: PathBuf,
    target: PathBuf,
}

impl Bench<'_> {
    /// Makes the copy equal to the workspace. Files that are equal already stay, so that little is rebuilt.
    fn lay_out(&self) -> Outcome<()> {
        for path in COPIED {
            copy(&self.root.join(path), &self.tree.join(path))?;
        }
        let manifest = fs::read_to_string(self.root.join("Cargo.toml"))?;
        write(&self.tree.join("Cargo.toml"), with_members(&manifest)?.as_bytes())?;
        let package = "[package]\nname = \"kvferry-tests\"\nedition.workspace = true\nversion.workspace = true\n\n\
                       [lib]\npath = \"src/random/mod.rs\"\n\n\
                       [dependencies]\nkvferry-geometry.workspace = true\nkvferry-oracle.workspace = true\n\
                       proptest.workspace = true\n";
        write(&self.tree.join("tests/Cargo.toml"), package.as_bytes())
    }

    /// Makes the copy equal to the workspace but for one fault.
    fn plant(&self, patch: &Path) -> Outcome<()> {
        copy(&self.root.join("crates/kvferry-geometry"), &self.tree.join("crates/kvferry-geometry"))?;
        let mut git = Command::new("git");
        // The copy may lie inside a repository, which then must not be taken for the one to patch.
        git.args(["apply", "--whitespace=nowarn"]).arg(patch).current_dir(&self.tree);
        if let Some(above) = self.tree.parent() {
            git.env("GIT_CEILING_DIRECTORIES", above);
        }
        let out = git.output()?;
        if out.status.success() {
            Ok(())
        } else {
            Err(format!("does not apply; write it anew: {}", String::from_utf8_lossy(&out.stderr).trim()).into())
        }
    }

    fn cargo(&self, args: &[&str]) -> Command {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["test", "--quiet", "-p", "kvferry-tests", "--test", "planner"]).args(args);
        cargo.current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.target).env("RUST_BACKTRACE", "0");
        cargo
    }

    fn test(&self) -> Outcome<Seen> {
        let built = self.cargo(&["--no-run"]).output()?;
        if !built.status.success() {
            return Ok(Seen::Broken(String::from_utf8_lossy(&built.stderr).into_owned()));
        }
        let mut tests = self.cargo(&[]);
        let cases = std::env::var("PROPTEST_CASES").unwrap_or_else(|_| "2000".into());
        let seed = std::env::var("KVFERRY_SEED").unwrap_or_else(|_| "1".into());
        // The first failure is enough; nobody reads the smallest one.
        tests.env("PROPTEST_CASES", cases).env("KVFERRY_SEED", seed).env("PROPTEST_MAX_SHRINK_ITERS", "0");
        let log = self.target.join("planner.log");
        tests.stdout(fs::File::create(&log)?).stderr(Stdio::null());
        let mut child = tests.spawn()?;
        let began = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if began.elapsed() > LIMIT {
                child.kill()?;
                child.wait()?;
                return Ok(Seen::Failed(format!("did not end in {} s", LIMIT.as_secs())));
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let log = fs::read_to_string(&log)?;
        if status.success() {
            return if log.contains("test result: ok") {
                Ok(Seen::Passed)
            } else {
                Ok(Seen::Broken("the tests did not run".into()))
            };
        }
        Ok(Seen::Failed(reason(&log)))
    }
}

/// The line of a log that says best what failed.
fn reason(log: &str) -> String {
    let said = |word: &str| log.lines().find(|l| l.contains(word));
    let after = |word: &str| log.lines().skip_while(|l| !l.contains(word)).nth(1);
    let line = said(" bytes wrong")
        .or_else(|| after("run again with"))
        .or_else(|| after("panicked at"))
        .unwrap_or("the tests fail");
    line.chars().take(180).collect()
}

/// The root manifest with only the copied packages.
fn with_members(manifest: &str) -> Outcome<String> {
    let start = manifest.find("members = [").ok_or("the root manifest lists no members")?;
    let end = start + manifest[start..].find(']').ok_or("the list of members does not end")?;
    let members = "members = [\"crates/kvferry-geometry\", \"tests\", \"tests/oracle\"";
    Ok(format!("{}{members}{}", &manifest[..start], &manifest[end..]))
}

/// Copies a file or a folder, and removes what is no longer there. Files that are equal are left alone.
fn copy(from: &Path, to: &Path) -> Outcome<()> {
    if !from.is_dir() {
        return write(to, &fs::read(from)?);
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(to)? {
        let entry = entry?;
        if !from.join(entry.file_name()).exists() {
            let path = entry.path();
            if path.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
        }
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

fn write(to: &Path, bytes: &[u8]) -> Outcome<()> {
    if fs::read(to).ok().as_deref() == Some(bytes) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    Ok(fs::write(to, bytes)?)
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A closed pipe is no reason to stop.
    writeln!(out, "{line}").and_then(|()| out.flush()).unwrap_or_default();
}
