//! `cargo xtask native`: the native libraries that the NIXL backend is built with and runs on.
//!
//! Two wheels of the Python package index hold them: `libclang`, which the build of `nixl-sys` reads headers with, and
//! `nixl-cu12`, NIXL itself with its plugins. pip fetches them from wherever it is configured to; only their shared
//! libraries are used, so the version of Python doesn't matter. They go into `native` of cargo's target directory.
//!
//! What holds: nothing is unpacked whose SHA-256 isn't recorded here. A folder of a library is whole or absent, also
//! after an interrupted run or beside another one. What the user has set (`LIBCLANG_PATH`, `NIXL_PLUGIN_DIR`) is
//! theirs: it is kept, and nothing is fetched for it.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use cargo_metadata::MetadataCommand;

mod wheel;

pub(crate) use wheel::NativeError;
use wheel::{LIBCLANG, NIXL};

/// No arguments.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// What children of cargo are to find.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Native {
    vars: Vec<(&'static str, String)>,
}

/// How UCX learns what memory is unmapped.
const HOOKS: &str = "UCX_MEM_MMAP_HOOK_MODE";

/// Fetches what isn't there and prints the environment for a shell's `eval`.
pub(crate) fn run(_: Args) -> anyhow::Result<ExitCode> {
    let native = prepare()?;
    for (name, value) in &native.vars {
        println!("export {name}={}", quoted(value));
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes sure that the libraries are there.
///
/// # Errors
/// [`NativeError`]; [`NativeError::is_refusal`] tells bytes that were refused from a machine that can't have them.
pub(crate) fn prepare() -> Result<Native, NativeError> {
    let metadata = MetadataCommand::new().no_deps().exec().map_err(|e| NativeError::Folder(e.to_string()))?;
    let folder = metadata.target_directory.join("native").into_std_path_buf();
    if folder.display().to_string().contains(':') {
        return Err(NativeError::Folder(format!("{} has a colon, which no search path can have", folder.display())));
    }
    let own = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty() && !Path::new(v).starts_with(&folder));

    let mut native = Native::default();
    if own("LIBCLANG_PATH").is_none() {
        let libclang = wheel::fetch(&LIBCLANG, &folder)?;
        native.set("LIBCLANG_PATH", LIBCLANG.libraries(&libclang));
        // The wheel has no headers of the compiler's own, such as stddef.h.
        if let (None, Some(include)) = (own("BINDGEN_EXTRA_CLANG_ARGS"), compiler_headers()) {
            native.vars.push(("BINDGEN_EXTRA_CLANG_ARGS", format!("-I{include}")));
        }
    }
    if own("NIXL_PLUGIN_DIR").is_none() {
        let nixl = wheel::fetch(&NIXL, &folder)?;
        let libraries = NIXL.libraries(&nixl);
        native.set("NIXL_PLUGIN_DIR", libraries.join("plugins"));
        let given = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        let dirs = [libraries, nixl.join("nixl_cu12.libs")];
        native.vars.push(("LD_LIBRARY_PATH", in_front(&dirs, &given)));
    }
    // Why: "Load it early" in the documentation of kvferry-nixl. All memory is registered by name, so nothing needs the hooks.
    if std::env::var_os(HOOKS).is_none() {
        native.vars.push((HOOKS, "none".to_owned()));
    }
    Ok(native)
}

impl Native {
    fn set(&mut self, name: &'static str, path: PathBuf) {
        self.vars.push((name, path.display().to_string()));
    }

    /// The variables of a child that builds or runs the NIXL backend.
    pub(crate) fn vars(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.vars.iter().map(|(name, value)| (*name, value.as_str()))
    }
}

/// A word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Where the C compiler keeps headers of its own.
fn compiler_headers() -> Option<String> {
    let compiler = std::env::var("CC").ok().filter(|c| !c.is_empty()).unwrap_or_else(|| "cc".to_owned());
    let output = Command::new(compiler).arg("-print-file-name=include").output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    // One that has none says the word it was asked for.
    (output.status.success() && Path::new(&path).is_absolute()).then_some(path)
}

/// A search path that begins with `dirs` and names each folder once.
fn in_front(dirs: &[PathBuf], given: &str) -> String {
    let ours: Vec<String> = dirs.iter().map(|d| d.display().to_string()).collect();
    let others = given.split(':').filter(|d| !d.is_empty() && !ours.iter().any(|o| o == d));
    let all: Vec<&str> = ours.iter().map(String::as_str).chain(others).collect();
    all.join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_path_doesn_t_grow_with_each_call() {
        let dirs = [PathBuf::from("/t/a"), PathBuf::from("/t/b")];
        let once = in_front(&dirs, "/usr/lib::/opt/lib");
        assert_eq!(once, "/t/a:/t/b:/usr/lib:/opt/lib");
        assert_eq!(in_front(&dirs, &once), once);
        assert_eq!(in_front(&dirs, ""), "/t/a:/t/b");
    }

    #[test]
    fn a_shell_reads_what_was_meant() {
        for text in ["/a/b c", "it's $HOME", ""] {
            let line = format!("printf %s {}", quoted(text));
            let output = Command::new("sh").args(["-c", &line]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), text);
        }
    }
}
