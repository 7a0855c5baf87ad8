//! vLLM's own connector workers over real NIXL: the bench of them that `--peer` names, driven one request at a time by a
//! script of ours (`peer.py`), so that its rounds alternate with everybody else's.

use std::io::{BufReader, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::pair::{Sample, idle, line, signal};
use crate::work::{Scene, Work};

const SCRIPT: &str = include_str!("peer.py");
/// vLLM's import and the start of two engines take seconds; a request less than one.
const PATIENCE: Duration = Duration::from_secs(120);

/// Where the peer is.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    engine: PathBuf,
    python: PathBuf,
}

impl Place {
    /// Looks for the bench and a Python that has its packages.
    pub(crate) fn find(peer: &Path, python: Option<&Path>) -> anyhow::Result<Self> {
        let engine = [peer.join("engine"), peer.to_owned()].into_iter().find(|d| d.join("bench.py").is_file());
        let engine =
            engine.with_context(|| format!("{} has no bench.py, nor has its folder engine", peer.display()))?;
        let venv = || [peer, &engine].map(|d| d.join("venv/bin/python")).into_iter().find(|p| p.exists());
        let python = python.map(Path::to_owned).or_else(venv).unwrap_or_else(|| "python3".into());
        Ok(Self { engine: engine.canonicalize()?, python })
    }

    /// What is installed there.
    pub(crate) fn versions(&self) -> anyhow::Result<String> {
        let code = "from importlib.metadata import version as v\n\
                    print('vLLM', v('vllm') + ', NIXL', v('nixl-cu12') + ', torch', v('torch'))";
        let output = Command::new(&self.python).args(["-c", code]).stderr(Stdio::null()).output()?;
        ensure!(output.status.success(), "{} does not have vllm and nixl-cu12", self.python.display());
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }
}

/// The script, and below it an engine a side, if one is started.
pub(crate) struct Peer {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    pids: Vec<u32>,
}

impl Peer {
    /// Imports vLLM.
    pub(crate) fn open(place: &Place) -> anyhow::Result<Self> {
        // The script is handed over as text: nothing is written anywhere. Answers get a descriptor of their own, since libraries print.
        let mut command = Command::new(&place.python);
        command.args(["-c", SCRIPT]).arg(&place.engine).arg("3").stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(if std::env::var_os("KVFERRY_COMPARE_LOUD").is_some() {
            Stdio::inherit()
        } else {
            Stdio::null()
        });
        // Its NIXL is the one of its own packages.
        command.env_remove("LD_LIBRARY_PATH").env_remove("NIXL_PLUGIN_DIR").current_dir(std::env::temp_dir());
        let null = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
        let null = null.as_raw_fd();
        // SAFETY: `dup2` may be called between fork and exec, and both descriptors are open then.
        unsafe {
            command.pre_exec(move || {
                if libc::dup2(1, 3) < 0 || libc::dup2(null, 1) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let mut child = command.spawn().with_context(|| format!("starting {}", place.python.display()))?;
        let (stdin, stdout) = (child.stdin.take().context("no input")?, child.stdout.take().context("no output")?);
        let mut peer = Self { child, stdin, stdout: BufReader::new(stdout), pids: Vec::new() };
        peer.hear()?;
        Ok(peer)
    }

    fn hear(&mut self) -> anyhow::Result<Value> {
        let said: Value = serde_json::from_str(&line(&mut self.stdout, PATIENCE)?)?;
        match said.get("error") {
            Some(why) => bail!("{why}"),
            None => Ok(said),
        }
    }

    fn ask(&mut self, order: &Value) -> anyhow::Result<Value> {
        self.stdin.write_all(format!("{order}\n").as_bytes())?;
        self.hear()
    }

    /// Starts both engines of a scene anew.
    pub(crate) fn start(&mut self, scene: Scene) -> anyhow::Result<()> {
        match scene {
            Scene::Blocks => bail!("vLLM's workers move requests"),
            Scene::Same => self.start_case("pull_70b_1_1", &[true, false]),
            Scene::Wider => self.start_case("pull_70b_bs16_64", &[false]),
        }
    }

    /// How long fresh engines take to meet: the same ranks with the same memory as for [`Scene::Same`], and a shorter request.
    pub(crate) fn handshake(&mut self) -> anyhow::Result<Duration> {
        self.start_case("pull_70b_1_1_256tok", &[false])?;
        Ok(self.read(Work::Request { contiguous: false, staged: false, wider: false })?.1)
    }

    fn start_case(&mut self, case: &str, contiguous: &[bool]) -> anyhow::Result<()> {
        self.wake()?;
        self.pids.clear();
        let said = self.ask(&json!({"do": "start", "case": case, "contiguous": contiguous}))?;
        self.pids = serde_json::from_value(said.get("pids").cloned().unwrap_or_default())?;
        Ok(())
    }

    /// Ends both engines.
    pub(crate) fn stop(&mut self) -> anyhow::Result<()> {
        self.wake()?;
        self.pids.clear();
        self.ask(&json!({"do": "stop"}))?;
        Ok(())
    }

    /// Nothing of it runs until [`wake`](Self::wake).
    pub(crate) fn rest(&self) -> anyhow::Result<()> {
        self.pids.iter().try_for_each(|&pid| signal(pid, Signal::STOP))
    }

    /// It may run.
    pub(crate) fn wake(&self) -> anyhow::Result<()> {
        self.pids.iter().try_for_each(|&pid| signal(pid, Signal::CONT))
    }

    /// A request; with the time of the handshake, if it was the first.
    pub(crate) fn read(&mut self, work: Work) -> anyhow::Result<(Sample, Duration)> {
        let Work::Request { contiguous, .. } = work else { bail!("vLLM's workers move requests") };
        let said = self.ask(&json!({"do": "read", "contiguous": contiguous}))?;
        let number = |name: &str| said.get(name).and_then(Value::as_f64).with_context(|| format!("no {name}"));
        let ms = |name: &str| Ok::<_, anyhow::Error>(Duration::from_secs_f64(number(name)? / 1e3));
        ensure!(number("failed")? == 0.0, "the request failed");
        let sample = Sample {
            wall: ms("total_ms")?,
            cpu_reader: ms("cpu_decode_ms")?,
            cpu_source: ms("cpu_prefill_ms")?,
            descriptors: said.get("descriptors").and_then(Value::as_u64).unwrap_or(0),
            lane: "cma (messages: tcp)".to_owned(),
        };
        Ok((sample, ms("handshake_ms")?))
    }

    /// Moves a request once more into cleared memory and compares every byte; how many are wrong.
    pub(crate) fn verify(&mut self, work: Work) -> anyhow::Result<u64> {
        let Work::Request { contiguous, .. } = work else { bail!("vLLM's workers move requests") };
        let said = self.ask(&json!({"do": "verify", "contiguous": contiguous}))?;
        said.get("wrong").and_then(Value::as_u64).context("no verdict")
    }

    /// Cores used while nothing is asked of it, by the source and by the reader.
    pub(crate) fn idle(&self, span: Duration) -> anyhow::Result<[f64; 2]> {
        let &[source, reader] = self.pids.as_slice() else { bail!("{} processes where two were due", self.pids.len()) };
        idle([source, reader], span)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Ranks that are stopped would stay.
        drop(self.stop());
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
