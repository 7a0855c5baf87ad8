//! All candidates by as many threads as there are: each takes the next that nobody has taken.

use std::io::{IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry_topology::sweep::{Question, Results, Sweep};

use super::state::{State, StateError};

/// How often is said how far it is: to people, and to a log.
const TERMINAL: Duration = Duration::from_millis(500);
const LOG: Duration = Duration::from_secs(10);

/// The most candidates that a thread takes at a time.
const SHARE: usize = 64;

/// What the threads share.
struct Shared<'a> {
    next: AtomicUsize,
    /// An error: nothing more is begun.
    stop: AtomicBool,
    kept: Mutex<(Results, Option<&'a mut State>, Option<StateError>)>,
}

/// What came of all candidates; of the best also what discrete events say, if that is asked for.
pub(super) fn all(
    sweep: &Sweep,
    mut state: Option<&mut State>,
    question: &Question,
    (threads, events): (usize, bool),
) -> Result<Results, StateError> {
    let candidates = sweep.candidates();
    let mut results = Results::new(candidates.len());
    if let Some(state) = &mut state {
        for (at, candidate) in candidates.iter().enumerate() {
            if let Some(outcome) = state.outcome(sweep, candidate) {
                results.set(at, outcome);
            }
        }
    }
    let open: Vec<usize> = (0..candidates.len()).filter(|at| !results.has(*at)).collect();
    // Those that have much in common are one thread's.
    let alike = |a: &usize, b: &usize| candidates.get(*a).zip(candidates.get(*b)).is_some_and(|(a, b)| a.is_like(b));
    let open: Vec<&[usize]> = open.chunk_by(alike).flat_map(|alike| alike.chunks(SHARE)).collect();
    let shared = Shared::new(results, state);
    shared.work(
        &open,
        threads,
        "candidates",
        || sweep.judge(),
        |judge, at| {
            let Some(candidate) = candidates.get(at) else { return Ok(()) };
            let outcome = judge.outcome(candidate);
            shared.keep(|results, state| {
                state.as_mut().map_or(Ok(()), |state| state.done(sweep, candidate, &outcome))?;
                results.set(at, outcome);
                Ok(())
            })
        },
    );
    let (mut results, mut state) = shared.end()?;
    if !events {
        return Ok(results);
    }
    let best: Vec<usize> = results.ranked(candidates, question.objective).into_iter().take(question.top).collect();
    if let Some(state) = &mut state {
        for at in &best {
            let known = candidates.get(*at).and_then(|c| state.events(sweep, c));
            results.events.extend(known.map(|known| (*at, known)));
        }
    }
    let open: Vec<usize> = best.into_iter().filter(|at| !results.events.contains_key(at)).collect();
    let open: Vec<&[usize]> = open.chunks(1).collect();
    let shared = Shared::new(results, state);
    shared.work(
        &open,
        threads,
        "confirmed",
        || (),
        |(), at| {
            let Some(candidate) = candidates.get(at) else { return Ok(()) };
            let events = sweep.confirm(candidate);
            shared.keep(|results, state| {
                state.as_mut().map_or(Ok(()), |state| state.confirmed(sweep, candidate, &events))?;
                results.events.insert(at, events);
                Ok(())
            })
        },
    );
    Ok(shared.end()?.0)
}

impl<'a> Shared<'a> {
    fn new(results: Results, state: Option<&'a mut State>) -> Self {
        let kept = Mutex::new((results, state, None));
        Self { next: AtomicUsize::new(0), stop: AtomicBool::new(false), kept }
    }

    /// Does something with what is kept; one thread at a time.
    fn keep(
        &self,
        with: impl FnOnce(&mut Results, &mut Option<&'a mut State>) -> Result<(), StateError>,
    ) -> Result<(), StateError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (results, state, _) = &mut *kept;
        with(results, state)
    }

    /// Does all that is open: each thread with something of its own, one list after the other.
    fn work<T>(
        &self,
        open: &[&[usize]],
        threads: usize,
        what: &str,
        own: impl Fn() -> T + Sync,
        one: impl Fn(&mut T, usize) -> Result<(), StateError> + Sync,
    ) {
        let all = open.iter().map(|list| list.len()).sum::<usize>();
        if all == 0 {
            return;
        }
        let ended = AtomicUsize::new(0);
        let work = || {
            let mut own = own();
            while let Some(list) = open.get(self.next.fetch_add(1, Ordering::Relaxed)) {
                for at in *list {
                    if self.stop.load(Ordering::Relaxed) {
                        return;
                    }
                    if let Err(error) = one(&mut own, *at) {
                        self.stop.store(true, Ordering::Relaxed);
                        self.kept.lock().unwrap_or_else(PoisonError::into_inner).2.get_or_insert(error);
                    }
                    ended.fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        let began = Instant::now();
        let terminal = std::io::stderr().is_terminal();
        let mut shown = false;
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.min(open.len())).map(|_| scope.spawn(work)).collect();
            let mut last = Instant::now();
            while workers.iter().any(|w| !w.is_finished()) {
                // Short sleeps at the beginning, so that a small sweep is not kept waiting.
                std::thread::sleep((began.elapsed() / 8).clamp(Duration::from_millis(1), Duration::from_millis(50)));
                if last.elapsed() > if terminal { TERMINAL } else { LOG } {
                    last = Instant::now();
                    shown = true;
                    self.progress((ended.load(Ordering::Relaxed), all), what, began.elapsed(), terminal);
                }
            }
        });
        if shown && terminal {
            self.progress((ended.load(Ordering::Relaxed), all), what, began.elapsed(), terminal);
            eprintln!();
        }
    }

    fn progress(&self, (ended, open): (usize, usize), what: &str, took: Duration, terminal: bool) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (done, feasible) = kept.0.done();
        drop(kept);
        let left = match ended {
            0 => String::new(),
            ended => {
                let each = took.as_secs_f64() / ended as f64;
                format!(", about {:.0} s left", each * (open - ended.min(open)) as f64)
            }
        };
        let text = format!("{} {ended} of {open} {what}, {feasible} of {done} work{left}", bar(ended, open));
        if terminal {
            eprint!("\r{text}\x1b[K");
            std::io::stderr().flush().unwrap_or(());
        } else {
            eprintln!("{text}");
        }
    }

    fn end(self) -> Result<(Results, Option<&'a mut State>), StateError> {
        let (results, state, error) = self.kept.into_inner().unwrap_or_else(PoisonError::into_inner);
        error.map_or(Ok((results, state)), Err)
    }
}

/// How far it is.
fn bar(ended: usize, all: usize) -> String {
    const WIDE: usize = 24;
    let full = (ended * WIDE / all.max(1)).min(WIDE);
    format!("[{}{}]", "#".repeat(full), "-".repeat(WIDE - full))
}
