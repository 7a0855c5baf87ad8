//! A copy of a part of the workspace, with at most one fault in it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use super::Outcome;

/// See the module's text.
pub(crate) struct Copy<'a> {
    root: &'a Path,
    pub(crate) tree: PathBuf,
    pub(crate) target: PathBuf,
}

impl<'a> Copy<'a> {
    /// One that lies in a folder of its own, with what it is built into.
    pub(crate) fn new(root: &'a Path, folder: &Path) -> Self {
        Self { root, tree: folder.join("tree"), target: folder.join("target") }
    }

    /// Makes these parts equal to the workspace's. Files that are equal already stay, so that little is rebuilt.
    pub(crate) fn restore(&self, paths: &[&str]) -> Outcome<()> {
        paths.iter().try_for_each(|path| copy(&self.root.join(path), &self.tree.join(path)))
    }

    /// Writes the root manifest with only these members.
    pub(crate) fn set_members(&self, members: &[&str]) -> Outcome<()> {
        let manifest = fs::read_to_string(self.root.join("Cargo.toml"))?;
        self.write("Cargo.toml", &with_members(&manifest, members)?)
    }

    /// Writes a file of its own.
    pub(crate) fn write(&self, path: &str, text: &str) -> Outcome<()> {
        write(&self.tree.join(path), text.as_bytes())
    }

    /// Applies a patch.
    pub(crate) fn apply(&self, patch: &Path) -> Outcome<()> {
        apply(&self.tree, &["apply", "--whitespace=nowarn"], patch)
    }

    /// A cargo that builds the copy.
    pub(crate) fn cargo(&self, args: &[&str]) -> Command {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(args).current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.target).env("RUST_BACKTRACE", "0");
        cargo
    }
}

/// Whether a patch applies to a tree; the tree stays as it is.
#[cfg(test)]
pub(crate) fn applies(tree: &Path, patch: &Path) -> Outcome<()> {
    apply(tree, &["apply", "--check"], patch)
}

/// A git that works in a folder. That may lie inside a repository, which then must not be taken for the one to patch.
pub(crate) fn git(folder: &Path) -> Command {
    let mut git = Command::new("git");
    git.current_dir(folder);
    if let Some(above) = folder.parent() {
        git.env("GIT_CEILING_DIRECTORIES", above);
    }
    git
}

fn apply(tree: &Path, args: &[&str], patch: &Path) -> Outcome<()> {
    let out = git(tree).args(args).arg(patch).output()?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!("does not apply; write it anew: {}", String::from_utf8_lossy(&out.stderr).trim()).into())
}

/// Waits until a process has ended; kills it, and gives nothing, where that takes too long.
pub(crate) fn wait(mut child: Child, limit: Duration) -> Outcome<Option<ExitStatus>> {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if began.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn with_members(manifest: &str, members: &[&str]) -> Outcome<String> {
    let list = |name: &str| -> Outcome<std::ops::Range<usize>> {
        let start =
            manifest.find(&format!("\n{name} = [")).ok_or_else(|| format!("the root manifest has no {name}"))?;
        let len = manifest[start..].find(']').ok_or("the list of members does not end")?;
        Ok(start..start + len + 1)
    };
    let (all, usual) = (list("members")?, list("default-members")?);
    let (first, second) = if all.start < usual.start { (&all, &usual) } else { (&usual, &all) };
    let members = format!("\nmembers = {members:?}");
    let (before, between, after) =
        (&manifest[..first.start], &manifest[first.end..second.start], &manifest[second.end..]);
    Ok(format!("{before}{members}{between}{after}"))
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

/// Whether a file is a patch.
pub(crate) fn is_patch(path: &Path) -> bool {
    path.extension() == Some(OsStr::new("patch"))
}
