//! One wheel: which file, how it is fetched, verified and unpacked.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use sha2::{Digest as _, Sha256};

/// A package, and its file for each machine.
pub(super) struct Wheel {
    package: &'static str,
    version: &'static str,
    /// Where the library is in it.
    library: &'static str,
    files: &'static [File],
}

/// A wheel's file.
struct File {
    /// As `std::env::consts::ARCH`.
    machine: &'static str,
    /// pip's name of the platform that it was made for.
    platform: &'static str,
    sha256: &'static str,
}

/// Reads C headers for bindgen.
pub(super) const LIBCLANG: Wheel = Wheel {
    package: "libclang",
    version: "18.1.1",
    library: "libclang-18.1.1.data/platlib/clang/native/libclang.so",
    files: &[
        File {
            machine: "x86_64",
            platform: "manylinux2010_x86_64",
            sha256: "c533091d8a3bbf7460a00cb6c1a71da93bffe148f172c7d03b1c31fbf8aa2a0b",
        },
        File {
            machine: "aarch64",
            platform: "manylinux2014_aarch64",
            sha256: "54dda940a4a0491a9d1532bf071ea3ef26e6dbaf03b5000ed94dd7174e8f9592",
        },
    ],
};

/// NIXL and its plugins.
pub(super) const NIXL: Wheel = Wheel {
    package: "nixl-cu12",
    version: "1.5.1",
    library: ".nixl_cu12.mesonpy.libs/libnixl_capi.so",
    files: &[
        File {
            machine: "x86_64",
            platform: "manylinux_2_28_x86_64",
            sha256: "341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a",
        },
        File {
            machine: "aarch64",
            platform: "manylinux_2_28_aarch64",
            sha256: "aced5529cc9781f8be1ee22e451c852630455460c1812b06cc863b05d797f2db",
        },
    ],
};

/// The CPython that NIXL's files were made for. Any Python 3 fetches them; nothing of Python in them is used.
const CPYTHON: [&str; 2] = ["3.11", "cp311"];

/// What the folder of a run that is under way, or was interrupted, is called.
const UNFINISHED: &str = "unfinished-";
/// No run takes so long.
const STALE: Duration = Duration::from_secs(86_400);

/// Unpacks the shared libraries of a wheel, and nothing else.
const UNPACK: &str = "\
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if re.search(r'\\.so(\\.[0-9.]+)?$', n)])
";

/// Why the native libraries aren't there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum NativeError {
    #[error(
        "{package} is not known for {machine} {system}; build on Linux on x86-64 or aarch64, or set LIBCLANG_PATH \
        and NIXL_PLUGIN_DIR to libraries of your own (and LD_LIBRARY_PATH to the folder of libnixl_capi.so)"
    )]
    Machine { package: &'static str, machine: &'static str, system: &'static str },
    #[error("{python} can't be started ({error}); install Python 3 with pip, or name one in PYTHON")]
    Python { python: String, error: io::Error },
    #[error(
        "pip could not fetch {package}=={version}; look to the network and pip's configuration, or install pip \
        (python3 -m ensurepip): {said}"
    )]
    Pip { package: &'static str, version: &'static str, said: String },
    #[error("{file} is refused: its SHA-256 is {found}, and {recorded} is recorded; look to where pip fetches from")]
    Hash { file: String, recorded: &'static str, found: String },
    #[error("{file} could not be unpacked: {said}")]
    Unpack { file: String, said: String },
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("cargo's target directory can't be used: {0}")]
    Folder(String),
}

impl NativeError {
    /// Whether bytes came that are not those recorded, as against none that could.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Hash { .. })
    }
}

/// The folder of `wheel` below `folder`; fetches it where it isn't there.
pub(super) fn fetch(wheel: &Wheel, folder: &Path) -> Result<PathBuf, NativeError> {
    let file = wheel.file(std::env::consts::OS, std::env::consts::ARCH)?;
    let home = folder.join(format!("{}-{}-{}", wheel.package, wheel.version, &file.sha256[..8]));
    if home.join(wheel.library).is_file() {
        return Ok(home);
    }
    fs::create_dir_all(folder).map_err(at(folder))?;
    sweep(folder);
    // Beside its last place, so that it can be renamed; removed when this is left in whatever way.
    let scratch = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(folder).map_err(at(folder))?;
    eprintln!("fetching {} {} with pip ...", wheel.package, wheel.version);
    let archive = download(wheel, file, scratch.path())?;
    verify(file, &archive)?;
    let unpacked = scratch.path().join("unpacked");
    unpack(&archive, &unpacked)?;
    if home.exists() && !home.join(wheel.library).is_file() {
        // Somebody has deleted a part of it.
        fs::remove_dir_all(&home).map_err(at(&home))?;
    }
    match fs::rename(&unpacked, &home) {
        // Another run was faster.
        Err(_) if home.join(wheel.library).is_file() => Ok(home),
        Err(error) => Err(NativeError::Io { path: home, error }),
        Ok(()) => Ok(home),
    }
}

impl Wheel {
    /// The folder of the library in an unpacked wheel.
    pub(super) fn libraries(&self, home: &Path) -> PathBuf {
        let library = home.join(self.library);
        library.parent().map_or_else(|| home.to_owned(), Path::to_owned)
    }

    fn file(&self, system: &'static str, machine: &'static str) -> Result<&'static File, NativeError> {
        let found = self.files.iter().find(|f| system == "linux" && f.machine == machine);
        found.ok_or(NativeError::Machine { package: self.package, machine, system })
    }
}

/// Removes what killed runs have left, as far as that can be.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(UNFINISHED);
        let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|at| at.elapsed().ok());
        if is_ours && age.is_some_and(|age| age > STALE) {
            fs::remove_dir_all(entry.path()).ok();
        }
    }
}

fn download(wheel: &Wheel, file: &File, folder: &Path) -> Result<PathBuf, NativeError> {
    let [version, abi] = CPYTHON;
    let mut pip = python();
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"])
        .args(["--retries", "1", "--only-binary=:all:", "--implementation", "cp"])
        .args(["--python-version", version, "--abi", abi, "--platform", file.platform, "--dest"])
        .arg(folder)
        .arg(format!("{}=={}", wheel.package, wheel.version));
    finish(pip)?.map_err(|said| NativeError::Pip { package: wheel.package, version: wheel.version, said })?;
    let mut found = None;
    for entry in fs::read_dir(folder).map_err(at(folder))? {
        let path = entry.map_err(at(folder))?.path();
        found = found.or_else(|| path.extension().is_some_and(|e| e == "whl").then_some(path));
    }
    let said = || "it ended well and left no wheel".to_owned();
    found.ok_or_else(|| NativeError::Pip { package: wheel.package, version: wheel.version, said: said() })
}

fn verify(file: &File, archive: &Path) -> Result<(), NativeError> {
    let found = sha256(archive).map_err(at(archive))?;
    if found == file.sha256 {
        return Ok(());
    }
    Err(NativeError::Hash { file: name(archive), recorded: file.sha256, found })
}

fn sha256(path: &Path) -> io::Result<String> {
    let mut file = fs::File::open(path)?;
    let (mut hash, mut piece) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        let n = file.read(&mut piece)?;
        if n == 0 {
            return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        }
        hash.update(&piece[..n]);
    }
}

fn unpack(archive: &Path, folder: &Path) -> Result<(), NativeError> {
    let mut unzip = python();
    // Isolated: no module of the current folder is taken for one of Python's own.
    unzip.args(["-I", "-c", UNPACK]).arg(archive).arg(folder);
    finish(unzip)?.map_err(|said| NativeError::Unpack { file: name(archive), said })?;
    if folder.is_dir() {
        return Ok(());
    }
    Err(NativeError::Unpack { file: name(archive), said: "no shared library is in it".to_owned() })
}

fn python() -> Command {
    let program = std::env::var("PYTHON").ok().filter(|p| !p.is_empty()).unwrap_or_else(|| "python3".to_owned());
    let mut command = Command::new(program);
    command.stdin(Stdio::null());
    command
}

/// Runs to the end; where it failed, the last line that it said.
fn finish(mut command: Command) -> Result<Result<(), String>, NativeError> {
    let python = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| NativeError::Python { python, error })?;
    if output.status.success() {
        return Ok(Ok(()));
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("it said nothing").trim();
    Ok(Err(format!("{last} ({})", output.status)))
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

fn at(path: &Path) -> impl Fn(io::Error) -> NativeError {
    move |error| NativeError::Io { path: path.to_owned(), error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_have_files_of_their_own() {
        for wheel in [&LIBCLANG, &NIXL] {
            let x = wheel.file("linux", "x86_64").unwrap();
            let arm = wheel.file("linux", "aarch64").unwrap();
            assert!(x.platform.ends_with("x86_64") && arm.platform.ends_with("aarch64"));
            assert!(x.sha256 != arm.sha256 && x.sha256.len() == 64 && arm.sha256.len() == 64);
            for (system, machine) in [("macos", "aarch64"), ("linux", "riscv64")] {
                let refused = wheel.file(system, machine).err().unwrap();
                assert!(matches!(refused, NativeError::Machine { .. }) && !refused.is_refusal(), "{refused}");
                assert!(refused.to_string().contains(machine), "{refused}");
            }
        }
    }

    #[test]
    fn other_bytes_are_refused_with_both_hashes() {
        let folder = tempfile::tempdir().unwrap();
        let archive = folder.path().join("x.whl");
        fs::write(&archive, b"abc").unwrap();
        // The example of FIPS 180.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(&archive).unwrap(), abc);
        let file = NIXL.file("linux", "x86_64").unwrap();
        let refused = verify(file, &archive).unwrap_err();
        assert!(refused.is_refusal());
        let text = refused.to_string();
        assert!(text.contains("x.whl") && text.contains(abc) && text.contains(file.sha256), "{text}");
    }

    #[test]
    fn what_is_there_is_not_fetched_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = NIXL.file(std::env::consts::OS, std::env::consts::ARCH);
        let Ok(file) = file else { return };
        let home = folder.path().join(format!("nixl-cu12-1.5.1-{}", &file.sha256[..8]));
        fs::create_dir_all(NIXL.libraries(&home)).unwrap();
        fs::write(home.join(NIXL.library), b"").unwrap();
        assert_eq!(fetch(&NIXL, folder.path()).unwrap(), home);
    }

    #[test]
    fn what_killed_runs_left_is_removed_and_what_runs_is_not() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["unfinished-old", "unfinished-new", "old"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let past = std::time::SystemTime::now() - 2 * STALE;
        for name in ["unfinished-old", "old"] {
            fs::File::open(folder.path().join(name)).unwrap().set_modified(past).unwrap();
        }
        sweep(folder.path());
        let left = |name: &str| folder.path().join(name).exists();
        assert!(!left("unfinished-old") && left("unfinished-new") && left("old"));
    }
}
