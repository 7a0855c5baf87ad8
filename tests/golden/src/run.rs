//! All scenarios of a path, judged by several threads and told in order.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crate::judge::{Outcome, judge, kind};
use crate::known::KnownWrong;
use crate::read::{ReadError, read};
use crate::schema::{Record, Verdict};

/// One scenario, judged.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Judged {
    /// Its name.
    pub name: String,
    /// Mode and kinds of layers.
    pub kind: String,
    /// The connector's verdict.
    pub recorded: Verdict,
    /// Its reasons.
    pub slugs: Vec<String>,
    /// Ours.
    pub outcome: Outcome,
}

impl Judged {
    /// Judges a record.
    #[must_use]
    pub fn new(record: &Record, known: &KnownWrong) -> Self {
        let mut slugs: Vec<String> = record.failures.iter().map(|f| f.slug.clone()).collect();
        slugs.sort();
        slugs.dedup();
        Self {
            name: record.name.clone(),
            kind: kind(record),
            recorded: record.verdict,
            slugs,
            outcome: judge(record, known.has(&record.name)),
        }
    }

    /// Whether it came out as it must.
    #[must_use]
    pub fn passed(&self) -> bool {
        !matches!(self.outcome, Outcome::Failed { .. })
    }
}

/// Judges every scenario of a folder or file on `threads` threads and gives them to `each` in the order in which they
/// stand there; says how many there were. At most four records a thread are in memory.
///
/// # Errors
/// The first file or record that can't be read; those before it were judged.
pub fn run(path: &Path, threads: usize, each: &mut dyn FnMut(Judged)) -> Result<u64, ReadError> {
    let known = KnownWrong::beside(path)?;
    let threads = threads.max(1);
    let (records_in, records) = sync_channel::<(u64, Record)>(threads);
    // Shared by the judges alone, so that the reader ends when they do.
    let records = Arc::new(Mutex::new(records));
    let known = &known;
    thread::scope(|scope| {
        let (judged_in, judged) = sync_channel::<(u64, Judged)>(2 * threads);
        for _ in 0..threads {
            let (records, out) = (Arc::clone(&records), judged_in.clone());
            scope.spawn(move || {
                while let Some((index, record)) = next(&records) {
                    // Nobody listens any more only where `each` has panicked.
                    if out.send((index, Judged::new(&record, known))).is_err() {
                        break;
                    }
                }
            });
        }
        drop((judged_in, records));
        let reader = scope.spawn(move || {
            let mut index = 0;
            read(path, &mut |record| {
                // Without a judge left there is a panic on its way that says so.
                let _gone = records_in.send((index, record)).is_err();
                index += 1;
            })
        });
        let (mut waiting, mut next) = (BTreeMap::new(), 0);
        for (index, one) in judged {
            waiting.insert(index, one);
            while let Some(one) = waiting.remove(&next) {
                each(one);
                next += 1;
            }
        }
        match reader.join() {
            Ok(count) => count,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn next(records: &Mutex<Receiver<(u64, Record)>>) -> Option<(u64, Record)> {
    records.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}
