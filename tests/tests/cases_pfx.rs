//! PFX cases: prefix hits, partial blocks, lists that grow.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::time::Duration;

use kvferry_geometry::request::{BoundRequest, Checkpoint, DstState, Request, RequestError, SrcState};
use kvferry_geometry::units::{BlockId, RankId, Tokens};
use kvferry_proto::lease::Closing;
use kvferry_proto::request::Step;
use kvferry_tests::by_hand::{Engine, Pair, holds, kv, pieces, request, source_byte, table, table_at, tokens, wants};
use kvferry_tests::by_hand_states::{Leased, Shape, falcon, has_read, leased};
use kvferry_tests::over_mem::World;

/// One head, 4 B a token, blocks of 16 tokens: 64 B a block.
fn pair() -> Pair {
    let engine = || Engine::new(vec![kv("a", 1, 2)], 1).blocks(16, 64);
    Pair::new(&engine(), &engine())
}

/// Destination blocks that change, of 64 B each.
fn changed(pair: &Pair, request: Request) -> Vec<(u64, u64)> {
    pieces(&pair.runs(0, 0, &pair.bind(request)), 64)
}

#[test]
fn pfx_01_a_partial_hit_pairs_by_position() {
    let src: Vec<u32> = (10..20).collect();
    // Only the new blocks are listed, or all ten: the same four move.
    for dst in [table_at(6, &[46, 47, 48, 49]), table(&(40..50).collect::<Vec<_>>())] {
        let request =
            Request { tokens: Tokens::new(160), src: vec![holds(160, table(&src))], dst: vec![wants(96, dst)] };
        assert_eq!(changed(&pair(), request), [(16, 46), (17, 47), (18, 48), (19, 49)]);
    }
}

#[test]
fn pfx_01_a_hit_inside_a_block_leaves_its_head_untouched() {
    let pair = pair();
    let bound = pair.bind(Request {
        tokens: Tokens::new(64),
        src: vec![holds(64, table(&[0, 1, 2, 3]))],
        dst: vec![wants(37, table(&[4, 5, 6, 7]))],
    });
    assert_eq!(bound.moves()[0].range, tokens(37, 64));
    let memory = pair.deliver(&bound, 0xEE).swap_remove(0).swap_remove(0);
    for (at, &byte) in (0u64..).zip(&memory) {
        let moved = (256 + 37 * 4..512).contains(&at);
        assert_eq!(byte, if moved { source_byte(0, 0, at - 256) } else { 0xEE }, "byte {at}");
    }
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    assert_eq!(world.dst_memory(), [[memory]]);
}

#[test]
fn pfx_04_a_full_hit_reads_nothing_from_a_named_source() {
    let pair = pair();
    let bound = pair.bind(Request {
        tokens: Tokens::new(48),
        src: vec![holds(48, table(&[1, 2, 3]))],
        dst: vec![wants(48, table(&[4, 5, 6]))],
    });
    assert!(bound.is_full_hit());
    assert!(pair.batch(0, 0, &bound).is_empty());
    assert!(pair.zeroed(0, &bound).is_empty());
    // Whom the source waits for doesn't depend on what is cached: an empty operation still ends and still tells.
    assert_eq!(pair.consumers(0), [0]);
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    assert_eq!(world.notices(0), [0]);
    assert!(world.dst_memory()[0][0].iter().all(|&b| b == 0xEE));
}

#[test]
fn pfx_04_a_full_hit_releases_at_once() {
    // The owners' machines: no rank is asked to read, so nothing is awaited between grant and release.
    let pair = pair();
    let Leased { consumer, bound, granted } = leased(&pair, 1, vec![holds(48, table(&[1, 2, 3]))]);
    let ended = granted.full_hit();
    assert!(ended.is_complete() && ended.results().is_empty());
    let (releasing, release) = ended.release().expect("nothing was to be read");
    let (closed, answer) = bound.release(&release, &consumer, Duration::ZERO).expect("its consumer");
    assert_eq!(closed.how(), Closing::Read, "the blocks are the producer's again");
    let Step::Next(Ok(held)) = releasing.on_answer(&answer) else { panic!("held") };
    assert!(held.ended().results().is_empty());
}

/// Attention in blocks of 16 tokens, 4 B a token, beside a state.
fn hybrid() -> Pair {
    let engine = Shape::new(vec![kv("attn", 1, 2), falcon("mixer")], 1).manifest();
    Pair::of(engine.clone(), engine)
}

fn hybrid_request(n: u64, state: u64, cached: u64, blocks: &[u32]) -> Request {
    let checkpoint = Checkpoint { position: Tokens::new(state), slot: BlockId::new(6) };
    Request {
        tokens: Tokens::new(n),
        src: vec![holds(n, table(blocks)), SrcState { checkpoints: vec![checkpoint] }.into()],
        dst: vec![wants(cached, table(blocks)), DstState { slot: Some(BlockId::new(4)), more: Vec::new() }.into()],
    }
}

#[test]
fn pfx_04_a_hybrid_whose_attention_is_all_cached_reads_its_state() {
    let pair = hybrid();
    let bound = pair.bind(hybrid_request(48, 48, 48, &[0, 1, 2]));
    assert!(!bound.is_full_hit());
    let state = pair.compatible.src().spec().bytes_per_state();
    let all = pair.descriptors(0, 0, &bound);
    let moved: Vec<_> = all.iter().map(|d| (d.dst_region.get(), d.src_offset, d.dst_offset, d.len)).collect();
    assert_eq!(moved, [(1, 6 * state.get(), 4 * state.get(), state.get())]);
    // Where the state is there, too, nothing is read.
    let mut all = hybrid_request(48, 48, 48, &[0, 1, 2]);
    all.dst[1] = DstState::default().into();
    assert!(pair.bind(all).is_full_hit());
}

#[test]
fn pfx_05_a_state_is_that_of_the_tokens_that_move() {
    // A prompt of 40 is taken up to 39, one of 33 up to 32: the state after as many, in 3 and in 2 blocks.
    let pair = hybrid();
    for (prompt, blocks) in [(40, 3u32), (33, 2)] {
        let ids: Vec<u32> = (0..blocks).collect();
        let n = prompt - 1;
        let bound = pair.bind(hybrid_request(n, n, 0, &ids));
        assert_eq!(bound.moves()[0].range, tokens(0, n));
        assert_eq!(bound.moves()[1].states[0].position.get(), n);
        // The state after the whole prompt is another one.
        let refused =
            BoundRequest::new(&pair.compatible, hybrid_request(n, prompt, 0, &ids)).expect_err("not that one");
        assert!(matches!(refused.0.as_slice(), [RequestError::NoState { position, .. }] if position.get() == n));
    }
}

#[test]
fn pfx_05_the_last_partial_block_moves() {
    // (tokens, blocks): 40 of a prompt of 40; a model that recomputes the last token takes 39, or 32 of 33.
    for (n, blocks) in [(40, 3), (39, 3), (33, 3), (32, 2)] {
        let pair = pair();
        let ids: Vec<u32> = (0..blocks).collect();
        let bound = pair.bind(request(n, &ids, &ids));
        assert_eq!(bound.moves()[0].range, tokens(0, n));
        assert_eq!(pair.runs(0, 0, &bound), [(0, 0, n * 4)]);
        let rest = u64::from(blocks) * 64 - n * 4;
        let zeroed: u64 = pair.zeroed(0, &bound).iter().map(|z| z.2).sum();
        assert_eq!(zeroed, rest);
        let too_few = request(n, &ids, &ids[1..]);
        assert!(BoundRequest::new(&pair.compatible, too_few).is_err());
    }
}

#[test]
fn pfx_06_every_block_of_a_grown_list_moves_once() {
    // Prefilled in three chunks: [5, 6], then [7, 8], then [9].
    let src = [vec![5, 6], vec![7, 8], vec![9]].concat();
    let moved = changed(&pair(), request(80, &src, &[30, 28, 26, 24, 22]));
    let mut by_source: Vec<_> = moved.iter().map(|p| p.0).collect();
    by_source.sort_unstable();
    assert_eq!(by_source, [5, 6, 7, 8, 9]);
    assert_eq!(moved, [(9, 22), (8, 24), (7, 26), (6, 28), (5, 30)]);
}

#[test]
fn pfx_07_what_was_delivered_stays_delivered() {
    // 64 tokens arrive, and the engine has no room to go on for some steps. Nothing has to be asked again: what was delivered is
    // a value that the engine keeps, and the lease behind it is over.
    let pair = pair();
    let ask = || request(64, &[1, 2, 3, 4], &[5, 6, 7, 8]);
    let Leased { consumer, bound, granted } = leased(&pair, 1, ask().src);
    let reading = granted.read(&pair.peers);
    let (src, dst) = (RankId::new(0), has_read(&pair, 0));
    let Step::Next(ended) = reading.on_rank(src, Ok(dst.clone())) else { panic!("its only rank has read") };
    let (releasing, release) = ended.release().expect("all was read");
    let (_, answer) = bound.release(&release, &consumer, Duration::ZERO).expect("its consumer");
    let Step::Next(Ok(held)) = releasing.on_answer(&answer) else { panic!("held") };
    // Two steps later, and after a preemption: as many tokens, and no second transfer.
    let loaded = |request| pair.bind(request).moves()[0].range;
    for _ in 0..3 {
        assert_eq!(loaded(ask()), tokens(0, 64));
        assert_eq!(held.ended().results()[&src], Ok(dst.clone()));
    }
    // Asking again would be another request, in which all is cached.
    let mut again = ask();
    again.dst[0] = wants(64, table(&[5, 6, 7, 8]));
    assert!(pair.bind(again).is_full_hit());
}
