//! Many small requests at a time in one process, with a transport that is done at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::{Assurance, Engine, EngineId, OfferSpec, PullSpec, Region, Tokens};
use kvferry_benches::engines::{BLOCK, listed, shape, wanted};
use kvferry_benches::instant::Instant as InstantTransport;
use kvferry_benches::measure::{cpu, median};

use crate::requests::told;
use crate::{KEY, seconds};

/// Requests under way, and blocks of one.
const WINDOW: u32 = 256;
const BLOCKS: u32 = 3;
const TURNS: usize = 5;

pub(crate) async fn run() {
    println!(
        "requests of {BLOCKS} blocks, {WINDOW} at a time, both engines in one process, one rank each, a transport that is done at once, \
         fenced;\nmedians of {TURNS} turns of pull and push\n"
    );
    let p = Arc::new(engine("p", 1).listen("memory:rates".parse().unwrap()).start().await.unwrap());
    let d = Arc::new(engine("d", 2).start().await.unwrap());
    turn(&p, &d, false, Duration::from_millis(20)).await;
    turn(&p, &d, true, Duration::from_millis(20)).await;
    let mut ways: [(Vec<Duration>, Vec<Duration>); 2] = Default::default();
    for _ in 0..TURNS {
        for (push, way) in [false, true].into_iter().zip(&mut ways) {
            let (count, took, spent) = turn(&p, &d, push, Duration::from_secs_f64(seconds())).await;
            way.0.push(took / count);
            way.1.push(spent / count);
        }
    }
    println!("| | requests/s | CPU a request |\n|---|---|---|");
    for (what, (took, spent)) in ["pull", "push"].into_iter().zip(ways) {
        println!("| {what} | {:.0} | {} |", 1.0 / median(took), told(median(spent)));
    }
    println!();
}

/// How many requests, how long they took, and the CPU time of all.
async fn turn(p: &Arc<Engine>, d: &Arc<Engine>, push: bool, time: Duration) -> (u32, Duration, Duration) {
    let (began, before) = (Instant::now(), cpu());
    let each = |slot: u32| {
        let (p, d) = (p.clone(), d.clone());
        tokio::spawn(async move {
            let ids = [slot * BLOCKS, slot * BLOCKS + 2, slot * BLOCKS + 1];
            let mut count = 0;
            loop {
                let reference = p.offer(OfferSpec::new(listed(&ids), KEY)).await.unwrap();
                let tokens = Tokens::new(u64::from(BLOCKS) * BLOCK);
                let spec = PullSpec { assurance: Assurance::Fenced, ..PullSpec::new(tokens, wanted(&ids), KEY) };
                let spec = if push { spec.push() } else { spec };
                d.pull(reference, spec).await.unwrap().await.unwrap();
                count += 1;
                if began.elapsed() >= time {
                    return count;
                }
            }
        })
    };
    let places: Vec<_> = (0..WINDOW).map(each).collect();
    let mut count = 0;
    for place in places {
        count += place.await.unwrap();
    }
    (count, began.elapsed(), cpu().saturating_sub(before))
}

fn engine(id: &str, name: u128) -> kvferry::EngineBuilder {
    let (spec, groups, ranks) = shape(2, 32, 1, 2 * WINDOW * BLOCKS);
    let mut builder = Engine::builder(EngineId::new(id).unwrap(), spec, groups);
    for manifest in ranks {
        let len = |r: &kvferry_geometry::layout::Region| usize::try_from(r.len.get()).unwrap();
        let memory = manifest.layout.regions.iter().map(|r| Region::zeroed(len(r)).unwrap()).collect();
        builder = builder.rank(manifest, memory, Box::new(InstantTransport::new(name)));
    }
    builder
}
