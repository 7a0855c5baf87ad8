//! The two engines as their schedulers see them: what is offered and pulled, and an account of what became of every lease.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kvferry::{
    Address, Assurance, CallError, Closing, ContentKey, Delivered, LeaseId, LeaseTerms, OfferSpec, OfferStream, Owner,
    OwnerEvent, OwnerEvents, PullHandle, PullSpec, Reference, Tokens,
};
use tokio::sync::watch;

use super::args::{Args, Mode};
use super::rank::engine_id;
use super::scenario::{Role, Scenario};

/// How long one request may take.
const DEADLINE: Duration = Duration::from_secs(300);
/// By when every lease has ended: longer than a lease that nobody reads lasts.
const LEASES: Duration = Duration::from_secs(60);

/// Both engines' owners, and what the prefill engine is told of its leases.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) scenario: Arc<Scenario>,
    pub(crate) prefill: Owner,
    pub(crate) decode: Owner,
    mode: Mode,
    offers: AtomicU64,
    account: watch::Receiver<Account>,
}

/// What the prefill engine was told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Account {
    /// How each lease ended.
    pub(crate) closed: BTreeMap<LeaseId, Closing>,
    /// Leases that ended more than once.
    pub(crate) again: u64,
    /// Ranks that were lost, one after another.
    pub(crate) lost: u64,
}

impl Service {
    pub(crate) async fn start(args: &Args, scenario: &Arc<Scenario>) -> anyhow::Result<Self> {
        let mut prefill = owner(args, scenario, Role::Prefill).await?;
        let decode = owner(args, scenario, Role::Decode).await?;
        let (sender, account) = watch::channel(Account::default());
        let events = prefill.take_events().context("the prefill engine's events were taken")?;
        tokio::spawn(keep(events, sender));
        Ok(Self {
            scenario: Arc::clone(scenario),
            prefill,
            decode,
            mode: args.mode,
            offers: AtomicU64::new(0),
            account,
        })
    }

    /// Offers a request's blocks at the prefill engine.
    pub(crate) async fn offer(&self, request: usize) -> Result<Reference, CallError> {
        let reference = self.prefill.offer(OfferSpec::new(self.scenario.src_groups(request), content(request))).await?;
        self.offers.fetch_add(1, Ordering::Relaxed);
        Ok(reference)
    }

    /// Announces a request's blocks, of which nothing is computed yet.
    pub(crate) async fn announce(&self, request: usize) -> Result<OfferStream, CallError> {
        let spec = OfferSpec::new(self.scenario.src_groups(request), content(request));
        let stream = self.prefill.announce(spec).await?;
        self.offers.fetch_add(1, Ordering::Relaxed);
        Ok(stream)
    }

    /// Begins to move them to the decode engine.
    pub(crate) async fn pull(
        &self,
        request: usize,
        reference: &Reference,
        assurance: Assurance,
    ) -> anyhow::Result<PullHandle> {
        let tokens = Tokens::new(self.scenario.ask.tokens);
        let spec = PullSpec::new(tokens, self.scenario.dst_groups(request), content(request));
        // The reference goes the way a router would take it: as text.
        let reference = reference.to_string().parse()?;
        let spec = if self.mode == Mode::Push { spec.push() } else { spec };
        Ok(self.decode.pull(reference, PullSpec { assurance, deadline: DEADLINE, ..spec }).await?)
    }

    /// Every request once, so many at a time; gives their deliveries and the time from the first offer to the last delivery.
    pub(crate) async fn round(
        &self,
        assurance: Assurance,
        concurrency: usize,
    ) -> anyhow::Result<(Vec<Delivered>, f64)> {
        let start = Instant::now();
        let (mut flying, mut delivered) = (VecDeque::new(), Vec::new());
        let mut land = async |(request, handle): (usize, PullHandle)| -> anyhow::Result<()> {
            delivered.push(handle.await.with_context(|| format!("request {request}"))?);
            Ok(())
        };
        for request in 0..self.scenario.requests.len() {
            if flying.len() == concurrency
                && let Some(first) = flying.pop_front()
            {
                land(first).await?;
            }
            let reference = self.offer(request).await?;
            flying.push_back((request, self.pull(request, &reference, assurance).await?));
        }
        for one in flying {
            land(one).await?;
        }
        Ok((delivered, start.elapsed().as_secs_f64()))
    }

    /// How many offers were made.
    pub(crate) fn offers(&self) -> u64 {
        self.offers.load(Ordering::Relaxed)
    }

    /// How a lease has ended, once it has.
    pub(crate) async fn closed(&self, lease: LeaseId) -> anyhow::Result<Closing> {
        let account = self.wait(|a| a.closed.contains_key(&lease), &format!("lease {lease} has not ended")).await?;
        account.closed.get(&lease).copied().context("it was there")
    }

    /// What is known once every lease that was offered has ended.
    pub(crate) async fn all_closed(&self) -> anyhow::Result<Account> {
        let offers = self.offers();
        self.wait(|a| a.closed.len() as u64 >= offers, "not every lease has ended").await
    }

    /// Waits until the prefill engine has noticed so many losses of ranks.
    pub(crate) async fn lost(&self, count: u64) -> anyhow::Result<()> {
        self.wait(|a| a.lost >= count, "the loss of a rank was not noticed").await.map(drop)
    }

    async fn wait(&self, until: impl Fn(&Account) -> bool, what: &str) -> anyhow::Result<Account> {
        let mut account = self.account.clone();
        match tokio::time::timeout(LEASES, account.wait_for(|a| until(a))).await {
            Ok(seen) => Ok(seen.context("the prefill engine has ended")?.clone()),
            Err(_) => bail!("{what} within {LEASES:?}"),
        }
    }

    /// Waits until no block of either engine is in quarantine.
    pub(crate) async fn nothing_in_doubt(&self) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let left = self.prefill.quarantined().await? + self.decode.quarantined().await?;
            if left == 0 {
                return Ok(());
            }
            if start.elapsed() > LEASES {
                bail!("{left} blocks are still in quarantine after {LEASES:?}");
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) async fn shutdown(self) {
        self.decode.shutdown().await;
        self.prefill.shutdown().await;
    }
}

async fn owner(args: &Args, scenario: &Scenario, role: Role) -> anyhow::Result<Owner> {
    let manifest = &scenario.engine(role).manifest;
    let ranks = u32::try_from(manifest.ranks().len())?;
    let builder = Owner::builder(engine_id(role)?, manifest.spec().clone(), manifest.groups().to_vec(), ranks)
        .model_identity(&scenario.model)
        .compat(args.ignore.options())
        .stripe(args.stripe)
        // A read of a second or more has its lease extended.
        .lease(LeaseTerms { beat: Duration::from_secs(1), ..LeaseTerms::default() })
        .listen(Address::loopback(0));
    Ok(builder.start().await?)
}

/// What a request's cache was computed from: here, its number.
fn content(request: usize) -> ContentKey {
    ContentKey::of(&[u32::try_from(request).unwrap_or(u32::MAX)], "", &[])
}

/// Keeps the account until the engine ends.
async fn keep(mut events: OwnerEvents, account: watch::Sender<Account>) {
    while let Some(event) = events.next().await {
        account.send_if_modified(|account| match event {
            OwnerEvent::Released { lease, how } => {
                account.again += u64::from(account.closed.insert(lease, how).is_some());
                true
            }
            OwnerEvent::RankLost { .. } => {
                account.lost += 1;
                true
            }
            _ => false,
        });
    }
}
