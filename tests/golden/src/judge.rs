//! One scenario's verdict.
//!
//! - What the connector carried out, we carry out with the same bytes ([`same`]), and they are
//!   exactly those that the consumer needs.
//! - Where it carried out but is known to have delivered wrong bytes, ours are proven by the oracle.
//! - What it refused, we either carry out, proven by the oracle, or refuse with a reason of our own; which of its
//!   refusals may stay refusals is listed in [`MAY_REFUSE`], and which ask nothing of geometry in [`WIRE`].

use std::collections::BTreeSet;

use crate::blocks::Lists;
use crate::engine::EngineError;
use crate::ours::Refusal;
use crate::pair::{NoPair, Pair};
use crate::relation::Relation;
use crate::same::{Tally, needs, same};
use crate::schema::{Mode, Rank, Record, SideName, Verdict};
use crate::{synth, vllm};

/// What is said of a record that is known to be wrong and yet has our relation.
pub const SAME_RELATION: &str = "the same relation";
/// In kvferry's reason for refusing views over each other's bytes.
const OVERLAP: &str = "share bytes of region";
const TOO_LARGE: &str = "the caches are larger than the oracle fills";

/// Refusals that concern a message and not geometry, and why the comparison has nothing to say about them.
pub const WIRE: &[(&str, &str)] = &[
    ("engine_id_mismatch", "the peer gives another engine's name; kvferry's handshake compares names before manifests"),
    ("payload_decode_error", "the payload is no message at all; kvferry's own wire has its own decoder and tests"),
    (
        "agent_metadata_decode_error",
        "a field of the message is missing or of another type; kvferry's wire has none of it",
    ),
];

/// A refusal that kvferry may share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MayRefuse {
    /// The connector's reason.
    pub slug: &'static str,
    /// What kvferry's own reason says; one that says something else fails.
    pub says: &'static str,
    /// Why that is right.
    pub why: &'static str,
}

const fn may(slug: &'static str, says: &'static str, why: &'static str) -> MayRefuse {
    MayRefuse { slug, says, why }
}

/// The refusals that kvferry may share; all others it must carry out.
pub const MAY_REFUSE: &[MayRefuse] = &[
    may("compat_hash_mismatch", "no conversion is done", "the caches have different data types"),
    may("replicated_block_len_mismatch", "B wide at the source", "the latents have different widths"),
    may("split_block_len_mismatch", "B wide at the source", "the heads have different widths"),
    may("num_regions_mismatch", "no item of that name", "one model has a layer that the other lacks"),
    may("region_names_mismatch", "no item of that name", "the models name their layers differently"),
    may("num_blocks_differs_between_remote_ranks", "its view reaches byte", "a rank claims a block beyond its memory"),
    may("unpairable_ssm_slots", "the state after", "the consumer asks for three states within one block"),
    may("csa_linear_tp_boundary", "are right by the oracle", "the recorded pages overlap; others are carried out"),
];

/// How a scenario came out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Both move the same bytes.
    Same {
        /// Which bytes those are, and what only the record moves.
        tally: Tally,
        /// The oracle filled both engines and found ours right; it does not fill very large ones.
        proven: bool,
    },
    /// The connector delivers wrong bytes; ours are right.
    Right {
        /// Bytes that arrive.
        bytes: u64,
        /// How the recorded relation differs.
        recorded: String,
    },
    /// The connector refuses; ours are right.
    Supported {
        /// Bytes that arrive.
        bytes: u64,
        /// What the record lacks and was made from its configuration.
        made: Vec<&'static str>,
    },
    /// Both refuse.
    Refused {
        /// Why we do.
        why: String,
    },
    /// Nothing to do with geometry.
    Wire {
        /// Why.
        why: &'static str,
    },
    /// It should have come out otherwise.
    Failed {
        /// What is wrong.
        why: String,
    },
}

/// Judges one scenario. `wrong` says that the connector is known to deliver wrong bytes.
#[must_use]
pub fn judge(record: &Record, wrong: bool) -> Outcome {
    let outcome = match record.verdict {
        Verdict::Accept => accepted(record, wrong),
        Verdict::Reject => rejected(record),
    };
    outcome.unwrap_or_else(|why| Outcome::Failed { why })
}

fn accepted(record: &Record, wrong: bool) -> Result<Outcome, String> {
    let refuses = |why: String| format!("kvferry refuses what the connector carries out: {why}");
    let pair = Pair::new(record, &record.sides.prefill.ranks, &record.sides.decode.ranks).map_err(|no| match no {
        NoPair::Refused(why) => refuses(why),
        NoPair::Record(why) => why,
    })?;
    let (mut tally, mut bytes, mut recorded, mut proven) = (Tally::default(), 0, String::new(), true);
    for request in &record.scenario.requests {
        let id = request.id.as_str();
        let lists = Lists::new(request, &pair.src, &pair.dst).map_err(|e| e.to_string())?;
        let ours = pair.exact(&lists, id)?.map_err(|e| refuses(e.to_string()))?;
        let ours = of_local_ranks(record, ours)?;
        let (producers, consumers) = (pair.contents(SideName::Prefill, &lists, id)?, pair.consumers(&lists, id)?);
        let theirs = Relation::new(&vllm::moved(record, id).map_err(|e| e.to_string())?, &producers);
        match same(&ours, &theirs, &pair.src, &needs(&pair.src, &pair.dst, &lists), &consumers) {
            Ok(t) => tally.add(t),
            Err(e) if wrong => recorded = e.to_string(),
            Err(e) => return Err(e.to_string()),
        }
        match pair.prove(&lists, id)? {
            Some(moved) => bytes += moved,
            None => proven = false,
        }
    }
    if !wrong {
        return Ok(Outcome::Same { tally, proven });
    }
    if !proven {
        return Err(TOO_LARGE.to_owned());
    }
    if recorded.is_empty() {
        // By design: what it writes wrongly is nothing that our manifest says the rank has.
        recorded = SAME_RELATION.to_owned();
    }
    Ok(Outcome::Right { bytes, recorded })
}

/// Our relation without the consumers that the record left out.
fn of_local_ranks(record: &Record, ours: Relation) -> Result<Relation, String> {
    let Some(local) = &record.scenario.local_ranks else { return Ok(ours) };
    if record.scenario.mode != Mode::Pull {
        return Err("the record leaves out some of the ranks that write; only readers can be left out".to_owned());
    }
    let ranks = &record.sides.decode.ranks;
    let kept: BTreeSet<usize> =
        (0..ranks.len()).filter(|&r| local.contains(&(ranks[r].pp_rank, ranks[r].tp_rank))).collect();
    Ok(ours.of_consumers(|rank| kept.contains(&rank)))
}

fn rejected(record: &Record) -> Result<Outcome, String> {
    let slugs: BTreeSet<&str> = record.failures.iter().map(|f| f.slug.as_str()).collect();
    if slugs.is_empty() {
        return Err("the connector refused without a reason".to_owned());
    }
    let wire: Option<Vec<&'static str>> = slugs.iter().map(|s| WIRE.iter().find(|w| w.0 == *s).map(|w| w.1)).collect();
    if let Some(&why) = wire.as_deref().and_then(<[_]>::first) {
        return Ok(Outcome::Wire { why });
    }
    let refused = |why: String| {
        let may = |slug: &&str| MAY_REFUSE.iter().any(|m| m.slug == *slug && why.contains(m.says));
        if slugs.iter().all(may) {
            return Ok(Outcome::Refused { why });
        }
        let named: Vec<&str> = slugs.iter().copied().collect();
        Err(format!("kvferry refuses it too ({}): {why}", named.join(", ")))
    };
    let Ranks { src, dst, mut made } = ranks(record).map_err(|e| e.to_string())?;
    let pair = match Pair::new(record, &src, &dst) {
        Ok(pair) => pair,
        Err(NoPair::Refused(why)) if why.contains(OVERLAP) => {
            let anew = anew(record).and_then(|pair| carried_out(record, &pair, &mut made)?.map_err(|e| e.to_string()));
            let anew = anew.map(|bytes| format!("laid out without overlap, {bytes} bytes are right by the oracle"));
            return refused(format!("{why}; {}", anew.unwrap_or_else(|e| format!("laid out without overlap: {e}"))));
        }
        Err(NoPair::Refused(why)) => return refused(why),
        Err(NoPair::Record(why)) => return Err(why),
    };
    match carried_out(record, &pair, &mut made)? {
        Ok(bytes) => Ok(Outcome::Supported { bytes, made }),
        Err(refusal) => refused(refusal.to_string()),
    }
}

/// Plans and proves all requests, or one that is made up; gives the bytes that moved. The inner error is a refusal.
fn carried_out(record: &Record, pair: &Pair, made: &mut Vec<&'static str>) -> Result<Result<u64, Refusal>, String> {
    let mut all = Vec::new();
    for request in &record.scenario.requests {
        all.push((request.id.as_str(), Lists::new(request, &pair.src, &pair.dst).map_err(|e| e.to_string())?));
    }
    if all.is_empty() {
        made.push("request");
        all.push(("made up", Lists::made_up(&pair.src, &pair.dst).map_err(|e| e.to_string())?));
    }
    let mut bytes = 0;
    for (id, lists) in &all {
        if let Err(refusal) = pair.exact(lists, id)? {
            return Ok(Err(refusal));
        }
        bytes += pair.prove(lists, id)?.ok_or(TOO_LARGE)?;
    }
    if bytes == 0 {
        return Err("the request moves nothing, which proves nothing".to_owned());
    }
    Ok(Ok(bytes))
}

/// Both engines from their configuration alone, with the recorded groups.
fn anew(record: &Record) -> Result<Pair, String> {
    let (scenario, sides) = (&record.scenario, &record.sides);
    let src = synth::ranks(&scenario.model, &scenario.prefill, SideName::Prefill, &sides.decode.ranks, None);
    let dst = synth::ranks(&scenario.model, &scenario.decode, SideName::Decode, &sides.prefill.ranks, None);
    let (src, dst) = (src.map_err(|e| e.to_string())?, dst.map_err(|e| e.to_string())?);
    Pair::new(record, &src, &dst).map_err(|no| match no {
        NoPair::Refused(why) | NoPair::Record(why) => why,
    })
}

/// The ranks of both sides, and which of them were made.
struct Ranks {
    src: Vec<Rank>,
    dst: Vec<Rank>,
    made: Vec<&'static str>,
}

/// The ranks of both sides: as recorded, changed as the record changed a peer's payload, or laid out where registration
/// failed.
fn ranks(record: &Record) -> Result<Ranks, EngineError> {
    let mut made = Vec::new();
    let scenario = &record.scenario;
    let (mut src, mut dst) = (record.sides.prefill.ranks.clone(), record.sides.decode.ranks.clone());
    if let Some(tamper) = &scenario.tamper {
        let peer = if scenario.mode == Mode::Pull { &mut src } else { &mut dst };
        let blocks = tamper.set.get("num_blocks").and_then(serde_json::Value::as_u64);
        for rank in peer {
            let named = tamper.ranks.as_ref().is_none_or(|r| r.contains(&(rank.pp_rank, rank.tp_rank)));
            for view in rank.layer_views.values_mut().filter(|_| named) {
                view.shape[0] = blocks.unwrap_or(view.shape[0]);
            }
        }
    }
    // A side is whole or not recorded at all: a failed registration is the engine's.
    let failed = |side: &str| record.failures.iter().any(|f| f.stage == "register" && f.side.as_deref() == Some(side));
    let groups = |lists: fn(&crate::schema::Request) -> usize| scenario.requests.first().map(lists);
    if src.is_empty() || failed("prefill") {
        made.push("producer's layout");
        let count = groups(|r| r.prefill_block_ids.len());
        let known = if failed("decode") { &[][..] } else { &dst[..] };
        src = synth::ranks(&scenario.model, &scenario.prefill, SideName::Prefill, known, count)?;
    }
    if dst.is_empty() || failed("decode") {
        made.push("consumer's layout");
        let count = groups(|r| r.decode_block_ids.len());
        dst = synth::ranks(&scenario.model, &scenario.decode, SideName::Decode, &src, count)?;
    }
    Ok(Ranks { src, dst, made })
}

/// What kind of scenario it is: mode and kinds of layers.
#[must_use]
pub fn kind(record: &Record) -> String {
    let mut kinds: Vec<String> = Vec::new();
    for layer in &record.scenario.model.layers {
        let kind = format!("{:?}", layer.kind).to_lowercase();
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let mode = if record.scenario.mode == Mode::Pull { "pull" } else { "push" };
    format!("{mode} {}", kinds.join("+"))
}
