//! What the recorded connector moved: descriptor pairs, then the steps after receipt, as plain byte runs.
//!
//! Nothing is computed here that the record does not say, except two steps that the connector does in place at the
//! consumer: a page that arrives in sub-blocks of the producer's block size (`convert`) or with heads outside tokens
//! (`permute_layout`) lies there as `[sub-block][head][token][element]` and is then brought into the strides of the
//! consumer's view.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::schema::{DescriptorList, Direction, LayerView, PostAction, Rank, Record, SideName, Transfer, Xfer};

/// Bytes that went from a producer rank's address to a consumer rank's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Run {
    /// Consumer rank, by its place in the record.
    pub dst_rank: usize,
    /// Its first byte.
    pub dst: u64,
    /// Producer rank, by its place in the record.
    pub src_rank: usize,
    /// Its first byte.
    pub src: u64,
    /// Bytes.
    pub len: u64,
}

/// A record that contradicts itself.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// A rank or list that the record does not have.
    #[error("request {request}: {what} is not in the record")]
    Missing {
        /// The request.
        request: String,
        /// What.
        what: String,
    },
    /// An index beyond its list.
    #[error("request {request}: descriptor {id} of list {handle}, which has {len}")]
    IdOutOfRange {
        /// The request.
        request: String,
        /// The list.
        handle: u64,
        /// The index.
        id: u64,
        /// Descriptors in the list.
        len: u64,
    },
    /// Two descriptors of a pair, or two lists of ids, of unequal length.
    #[error("request {request}: {local} {what} on the starting side, {remote} on the other")]
    Unpaired {
        /// The request.
        request: String,
        /// What differs.
        what: &'static str,
        /// There.
        local: u64,
        /// Here.
        remote: u64,
    },
    /// The expanded pairs are not those that were recorded.
    #[error("request {request}: the pairs of {agent} expand to other bytes than were recorded ({what})")]
    Expansion {
        /// The request.
        request: String,
        /// The other rank.
        agent: String,
        /// What differs.
        what: &'static str,
    },
    /// A step after receipt that is not understood.
    #[error("request {request}: the step after receipt is not understood: {what}")]
    Post {
        /// The request.
        request: String,
        /// Why.
        what: &'static str,
    },
    /// Addresses beyond 64 bits.
    #[error("request {request}: addresses overflow")]
    Overflow {
        /// The request.
        request: String,
    },
}

/// The byte runs that one request moved, after the steps that follow receipt; in no order.
///
/// # Errors
/// What the record lacks or contradicts. The expanded pairs are held against `pairs` and `pairs_sha256` where recorded.
pub fn moved(record: &Record, request: &str) -> Result<Vec<Run>, RecordError> {
    let mut runs = Vec::new();
    for transfer in record.transfers.iter().filter(|t| t.request == request) {
        let lists = lists_of(record, transfer);
        for xfer in &transfer.xfers {
            expand(record, transfer, xfer, &lists, &mut runs)?;
        }
    }
    let consumers = &record.sides.decode.ranks;
    for (dst_rank, rank) in consumers.iter().enumerate() {
        let mine = |pp: u32, tp: u32| (pp, tp) == (rank.pp_rank, rank.tp_rank);
        let pulled = record
            .transfers
            .iter()
            .filter(|t| t.request == request && t.local_side == SideName::Decode && mine(t.pp_rank, t.tp_rank));
        let pushed = record
            .completions
            .iter()
            .filter(|c| c.request == request && c.side == Some(SideName::Decode) && mine(c.pp_rank, c.tp_rank));
        let actions = pulled.flat_map(|t| &t.post_actions).chain(pushed.flat_map(|c| &c.post_actions));
        for action in actions {
            after_receipt(request, action, dst_rank, rank, &mut runs)?;
        }
    }
    Ok(runs)
}

type Lists<'r> = BTreeMap<u64, List<'r>>;

/// A list with the index of each row's first descriptor.
struct List<'r> {
    list: &'r DescriptorList,
    starts: Vec<u64>,
    len: u64,
}

impl<'r> List<'r> {
    fn new(list: &'r DescriptorList) -> Self {
        let mut len = 0u64;
        let starts = list
            .rows
            .iter()
            .map(|row| {
                let start = len;
                len = len.saturating_add(row[4]);
                start
            })
            .collect();
        Self { list, starts, len }
    }

    /// Address, length and device of a descriptor.
    fn get(&self, request: &str, id: u64) -> Result<[u64; 3], RecordError> {
        let out =
            || RecordError::IdOutOfRange { request: request.to_owned(), handle: self.list.handle, id, len: self.len };
        if id >= self.len {
            return Err(out());
        }
        // The last row that starts at or before it; rows without descriptors start where the next one does.
        let at = self.starts.partition_point(|&s| s <= id).checked_sub(1).ok_or_else(out)?;
        let [addr, len, device, stride, _] = self.list.rows[at];
        let addr = (id - self.starts[at]).checked_mul(stride).and_then(|o| addr.checked_add(o));
        let overflow = || RecordError::Overflow { request: request.to_owned() };
        let addr = addr.filter(|a| a.checked_add(len).is_some()).ok_or_else(overflow)?;
        Ok([addr, len, device])
    }
}

fn lists_of<'r>(record: &'r Record, transfer: &Transfer) -> Lists<'r> {
    let side = match transfer.local_side {
        SideName::Prefill => &record.sides.prefill,
        SideName::Decode => &record.sides.decode,
    };
    let mine = |pp: u32, tp: u32| (pp, tp) == (transfer.pp_rank, transfer.tp_rank);
    let own = side.ranks.iter().filter(|r| mine(r.pp_rank, r.tp_rank)).flat_map(|r| &r.dlists_at_register);
    let met = record
        .handshakes
        .iter()
        .filter(|h| h.local_side == transfer.local_side && mine(h.pp_rank, h.tp_rank))
        .flat_map(|h| &h.dlists);
    own.chain(met).map(|list| (list.handle, List::new(list))).collect()
}

fn expand(
    record: &Record,
    transfer: &Transfer,
    xfer: &Xfer,
    lists: &Lists<'_>,
    runs: &mut Vec<Run>,
) -> Result<(), RecordError> {
    let request = || transfer.request.clone();
    let missing = |what: String| RecordError::Missing { request: request(), what };
    let list = |handle: u64| lists.get(&handle).ok_or_else(|| missing(format!("descriptor list {handle}")));
    let (local, remote) = (list(xfer.local_handle)?, list(xfer.remote_handle)?);
    let (here, there) = match transfer.local_side {
        SideName::Prefill => (&record.sides.prefill, &record.sides.decode),
        SideName::Decode => (&record.sides.decode, &record.sides.prefill),
    };
    let place = |ranks: &[Rank], pp: u32, tp: u32| ranks.iter().position(|r| (r.pp_rank, r.tp_rank) == (pp, tp));
    let unknown = || missing(format!("agent {}", xfer.remote_agent));
    let (pp, tp) = agent_rank(&xfer.remote_agent).ok_or_else(unknown)?;
    let there = place(&there.ranks, pp, tp).ok_or_else(unknown)?;
    let here = place(&here.ranks, transfer.pp_rank, transfer.tp_rank)
        .ok_or_else(|| missing(format!("rank {}/{}", transfer.pp_rank, transfer.tp_rank)))?;
    let unpaired = |what, local, remote| RecordError::Unpaired { request: request(), what, local, remote };
    if xfer.local_ids.len() != xfer.remote_ids.len() {
        return Err(unpaired("descriptor ids", xfer.local_ids.len() as u64, xfer.remote_ids.len() as u64));
    }
    let mut hash = Sha256::new();
    for (k, (&l, &r)) in xfer.local_ids.iter().zip(&xfer.remote_ids).enumerate() {
        let (l, r) = (local.get(&transfer.request, l)?, remote.get(&transfer.request, r)?);
        let pair = [l[0], l[1], l[2], r[0], r[1], r[2]];
        pair.iter().for_each(|n| hash.update(n.to_le_bytes()));
        let expansion = |what| RecordError::Expansion { request: request(), agent: xfer.remote_agent.clone(), what };
        if xfer.pairs.as_ref().is_some_and(|pairs| pairs.get(k) != Some(&pair)) {
            return Err(expansion("a pair"));
        }
        if l[1] != r[1] {
            return Err(unpaired("bytes of a descriptor", l[1], r[1]));
        }
        runs.push(match xfer.op {
            Direction::Read => Run { dst_rank: here, dst: l[0], src_rank: there, src: r[0], len: l[1] },
            Direction::Write => Run { dst_rank: there, dst: r[0], src_rank: here, src: l[0], len: l[1] },
        });
    }
    let got: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    if xfer.pairs_sha256.as_ref().is_some_and(|want| *want != got) {
        return Err(RecordError::Expansion {
            request: request(),
            agent: xfer.remote_agent.clone(),
            what: "their digest",
        });
    }
    Ok(())
}

/// Stage and rank of `engine/pp0/tp3`.
fn agent_rank(agent: &str) -> Option<(u32, u32)> {
    let mut parts = agent.rsplit('/');
    let tp = parts.next()?.strip_prefix("tp")?.parse().ok()?;
    let pp = parts.next()?.strip_prefix("pp")?.parse().ok()?;
    Some((pp, tp))
}

/// A page whose bytes are brought into another order after receipt.
struct Page {
    start: u64,
    view: LayerView,
    sub_blocks: u64,
}

fn after_receipt(
    request: &str,
    action: &PostAction,
    dst_rank: usize,
    rank: &Rank,
    runs: &mut Vec<Run>,
) -> Result<(), RecordError> {
    let refuse = |what| RecordError::Post { request: request.to_owned(), what };
    let (ratio, permute, groups) = match action {
        // What is zeroed did not arrive, so the relation has none of it.
        PostAction::ZeroRegionBlocks {} => return Ok(()),
        PostAction::Other => return Err(refuse("an unknown action")),
        PostAction::PostProcess { convert: false, permute_layout: false, .. } => return Ok(()),
        PostAction::PostProcess { block_size_ratio, permute_layout, groups, .. } => {
            ((*block_size_ratio).max(1), *permute_layout, groups)
        }
    };
    let mut pages = Vec::new();
    let sent: Vec<_> = rank.kv_cache_groups.iter().filter(|g| g.enable_kv_transfer).collect();
    for group in groups {
        let layers = &sent.get(group.group).ok_or_else(|| refuse("a group that the rank lacks"))?.layer_names;
        for name in layers {
            let view = *rank.layer_views.get(name).ok_or_else(|| refuse("a layer without a view"))?;
            let [_, heads, entries, _] = view.shape;
            if entries == 0 || entries % ratio != 0 {
                return Err(refuse("entries that are no multiple of the ratio"));
            }
            if heads <= 1 && !permute {
                // Sub-blocks of one head lie in the consumer's order already.
                continue;
            }
            for &block in &group.local_block_ids {
                let start = block.checked_mul(view.strides_bytes[0]).and_then(|o| o.checked_add(view.addr));
                let start = start.ok_or_else(|| RecordError::Overflow { request: request.to_owned() })?;
                pages.push(Page { start, view, sub_blocks: ratio });
            }
        }
    }
    pages.sort_by_key(|p| p.start);
    let mut out = Vec::with_capacity(runs.len());
    for run in runs.drain(..) {
        if run.dst_rank == dst_rank {
            regroup(&pages, run, &mut out).ok_or_else(|| refuse("a run that crosses the end of a page"))?;
        } else {
            out.push(run);
        }
    }
    *runs = out;
    Ok(())
}

/// Cuts a run at the vectors of the page that it arrived in and puts each where it belongs. `None` where it crosses the
/// page's end or addresses overflow.
fn regroup(pages: &[Page], run: Run, out: &mut Vec<Run>) -> Option<()> {
    let page = pages.partition_point(|p| p.start <= run.dst).checked_sub(1).map(|i| &pages[i]);
    let Some(page) = page.filter(|p| p.bytes().is_some_and(|bytes| run.dst - p.start < bytes)) else {
        out.push(run);
        return Some(());
    };
    let [_, heads, entries, _] = page.view.shape;
    let [_, head_stride, entry_stride, _] = page.view.strides_bytes;
    let (vector, per_sub) = (page.vector()?, entries / page.sub_blocks);
    let mut at = run.dst - page.start;
    if at.checked_add(run.len)? > page.bytes()? {
        return None;
    }
    let (mut src, mut left) = (run.src, run.len);
    while left > 0 {
        let (index, inside) = (at / vector, at % vector);
        let (outer, entry) = (index / per_sub, index % per_sub);
        let (sub, head) = (outer / heads, outer % heads);
        let len = left.min(vector - inside);
        let of_head = page.start.checked_add(head.checked_mul(head_stride)?)?;
        let dst = of_head.checked_add((sub * per_sub + entry).checked_mul(entry_stride)?)?.checked_add(inside)?;
        dst.checked_add(len)?;
        out.push(Run { dst, src, len, ..run });
        (at, src, left) = (at + len, src + len, left - len);
    }
    Some(())
}

impl Page {
    /// Bytes of one head's entry.
    fn vector(&self) -> Option<u64> {
        self.view.shape[3].checked_mul(self.view.element_size).filter(|v| *v > 0)
    }

    fn bytes(&self) -> Option<u64> {
        self.view.shape[1].checked_mul(self.view.shape[2])?.checked_mul(self.vector()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_counted_along_the_rows() {
        let rows = vec![[100, 8, 0, 16, 2], [500, 8, 0, 16, 0], [900, 4, 1, 4, 3]];
        let list = DescriptorList { handle: 7, agent: "a".into(), rows };
        let list = List::new(&list);
        let got: Vec<_> = (0..5).map(|id| list.get("r", id).unwrap()).collect();
        assert_eq!(got, [[100, 8, 0], [116, 8, 0], [900, 4, 1], [904, 4, 1], [908, 4, 1]]);
        assert!(matches!(list.get("r", 5), Err(RecordError::IdOutOfRange { id: 5, len: 5, .. })));
    }

    #[test]
    fn a_list_that_claims_too_much_is_refused_and_not_allocated() {
        let rows = vec![[u64::MAX - 8, 4, 0, u64::MAX, u64::MAX], [0, 4, 0, 4, u64::MAX]];
        let list = DescriptorList { handle: 7, agent: "a".into(), rows };
        let list = List::new(&list);
        assert_eq!(list.get("r", 0).unwrap()[0], u64::MAX - 8);
        assert!(matches!(list.get("r", 3), Err(RecordError::Overflow { .. })));
    }

    /// Two sub-blocks of two tokens, two heads, vectors of 4 bytes, into heads outside four tokens.
    #[test]
    fn sub_blocks_are_regrouped() {
        let view = LayerView {
            addr: 1000,
            shape: [3, 2, 4, 2],
            strides_bytes: [32, 16, 4, 2],
            element_size: 2,
            block_stride: None,
        };
        let pages = [Page { start: 1032, view, sub_blocks: 2 }];
        let run = Run { dst_rank: 0, dst: 1034, src_rank: 0, src: 0, len: 20 };
        let mut out = Vec::new();
        regroup(&pages, run, &mut out).unwrap();
        let got: Vec<_> = out.iter().map(|r| (r.dst - 1032, r.src, r.len)).collect();
        // (sub 0, head 0) tokens 0, 1; (sub 0, head 1) tokens 0, 1 lie at 16; (sub 1, head 0) token 2 lies at 8.
        assert_eq!(got, [(2, 0, 2), (4, 2, 4), (16, 6, 4), (20, 10, 4), (8, 14, 4), (12, 18, 2)]);
        let mut out = Vec::new();
        assert!(regroup(&pages, Run { len: 31, ..run }, &mut out).is_none());
    }

    #[test]
    fn agents_are_named_by_stage_and_rank() {
        assert_eq!(agent_rank("engine/with/slash/pp2/tp13"), Some((2, 13)));
        assert_eq!(agent_rank("engine"), None);
    }
}
