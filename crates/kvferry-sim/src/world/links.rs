//! What owners say to each other: links that keep the order, take their time, break, and can't be made.

use std::time::Duration;

use kvferry_proto::handshake::Claim;
use kvferry_proto::peer::PeerMessage;
use kvferry_session::owner::LinkId;

use super::{Conn, End, Happens, Packet, Script, World};
use crate::faults::FaultKind;
use crate::rng::{Rng, ms, us};
use crate::violation::Violation;

impl<S: Script> World<S> {
    /// How long a message takes between two engines, by a generator of its link.
    pub(crate) fn delay(&mut self, rng: &mut Rng, (from, to): (u32, u32)) -> Duration {
        let (low, high) = S::latency(self, from, to);
        let usual = rng.time(low, high);
        let luck = rng.below(10_000);
        let rate = self.config.faults.rates.get(&FaultKind::Jitter).copied().unwrap_or(0);
        if luck < u64::from(rate) && !self.healed && self.config.mask.has(FaultKind::Jitter) {
            self.stats.fault(FaultKind::Jitter);
            return usual * rng.small(2, 100);
        }
        usual
    }

    fn cut_between(&self, a: u32, b: u32) -> Option<Duration> {
        self.cut.get(&(a.min(b), a.max(b))).copied().filter(|until| *until > self.now)
    }

    /// An owner connects.
    pub(crate) fn connect(&mut self, engine: u32, link: LinkId, address: &str) {
        let life = self.life(engine);
        let to = address.strip_prefix('e').and_then(|n| n.parse::<u32>().ok());
        let reachable = to.filter(|to| self.engines.get(*to as usize).is_some_and(|e| e.owner.is_some()));
        let Some(to) = reachable.filter(|to| self.cut_between(engine, *to).is_none()) else {
            // Refused at once where there is a host, or not at all answered.
            let after = if self.rng.chance(5000) { us(200) } else { ms(700) };
            return self.put(after, Happens::NotMade(engine, life, link));
        };
        let number = self.next_conn;
        self.next_conn += 1;
        let mut rng = Rng::of(&[self.config.seed, 7, number]);
        let ends = [
            End { engine, life, link: Some(link), open: true },
            End { engine: to, life: self.life(to), link: None, open: true },
        ];
        let there = self.now + self.delay(&mut rng, (engine, to));
        let back = there + self.delay(&mut rng, (to, engine));
        self.conns.insert(number, Conn { ends, last: [back, there], rng });
        if let Some(e) = self.engines.get_mut(engine as usize) {
            e.links.insert(link, number);
        }
        self.queue.put(there, Happens::Accept(number));
        self.queue.put(back, Happens::Opened(number));
    }

    pub(crate) fn not_made(&mut self, engine: u32, life: u32, link: LinkId) {
        self.count(1, u64::from(engine), link.0);
        if self.life(engine) == life {
            self.with_owner(engine, |owner, now| owner.link_closed(link, "no answer", now));
        }
    }

    pub(crate) fn accept(&mut self, number: u64) {
        let Some(End { engine, life, open: true, .. }) = self.conns.get(&number).map(|c| c.ends[1]) else { return };
        if self.life(engine) != life {
            return;
        }
        self.count(2, u64::from(engine), number);
        let mut link = None;
        self.with_owner(engine, |owner, now| link = Some(owner.accept(None, now)));
        if let (Some(link), Some(conn)) = (link, self.conns.get_mut(&number)) {
            conn.ends[1].link = Some(link);
            if let Some(e) = self.engines.get_mut(engine as usize) {
                e.links.insert(link, number);
            }
        }
        self.pump_owner(engine);
    }

    pub(crate) fn opened(&mut self, number: u64) {
        let Some(End { engine, life, link: Some(link), open: true }) = self.conns.get(&number).map(|c| c.ends[0])
        else {
            return;
        };
        if self.life(engine) != life {
            return;
        }
        self.count(3, u64::from(engine), number);
        let mut wanted = true;
        self.with_owner(engine, |owner, now| wanted = owner.link_opened(link, None, now));
        if !wanted {
            self.close(engine, link);
        }
        self.pump_owner(engine);
    }

    /// A session sends; what was sent before on the link arrives before.
    pub(crate) fn send_peer(&mut self, engine: u32, link: LinkId, message: PeerMessage) {
        let Some(number) = self.engines.get(engine as usize).and_then(|e| e.links.get(&link)).copied() else { return };
        S::said(self, engine, link, &message);
        let claim = match &message {
            PeerMessage::Hello(hello) => Some(Claim::from(hello)),
            _ => None,
        };
        let packet = match Packet::peer(message, self.config.wire) {
            Ok(packet) => packet,
            Err(error) => return self.violates(Violation::Unreadable { engine, error }),
        };
        let Some(at) = self.arrival(number, engine, link) else { return };
        let Some(conn) = self.conns.get(&number) else { return };
        let second = Self::is_first(conn, engine, link);
        // What a hello claims is told before, as of one that takes long to be read: at one of the ends.
        if let Some(claim) = claim
            && number.is_multiple_of(2) == second
        {
            let early = self.now + at.saturating_sub(self.now) / 2;
            self.queue.put(early, Happens::Claim(number, second, Box::new(claim)));
        }
        self.queue.put(at, Happens::Peer(number, second, packet));
    }

    /// Who hears at an end of a connection, and on which link of its own; `None` where nobody does, or not yet.
    fn hearer(&self, number: u64, second: bool) -> Option<(u32, LinkId)> {
        let End { engine, life, link, open } = self.conns.get(&number)?.ends[usize::from(second)];
        Some((engine, link.filter(|_| open && self.life(engine) == life)?))
    }

    pub(crate) fn peer_claims(&mut self, number: u64, second: bool, claim: &Claim) {
        let Some((engine, link)) = self.hearer(number, second) else { return };
        self.note(|_| format!("e{engine} hears on {link:?} who greets"));
        self.with_owner(engine, |owner, now| owner.peer_claims(link, claim, now));
        self.pump_owner(engine);
    }

    fn is_first(conn: &Conn, engine: u32, link: LinkId) -> bool {
        conn.ends[0].engine == engine && conn.ends[0].link == Some(link)
    }

    /// When what is sent now from an end arrives at the other.
    fn arrival(&mut self, number: u64, engine: u32, link: LinkId) -> Option<Duration> {
        let conn = self.conns.get_mut(&number)?;
        let to = usize::from(Self::is_first(conn, engine, link));
        let (a, b) = (conn.ends[0].engine, conn.ends[1].engine);
        let mut rng = conn.rng.clone();
        let begin = self.cut_between(a, b).unwrap_or(self.now);
        let way = if to == 1 { (a, b) } else { (b, a) };
        let at = begin + self.delay(&mut rng, way);
        let conn = self.conns.get_mut(&number)?;
        conn.rng = rng;
        conn.last[to] = conn.last[to].max(at);
        Some(conn.last[to])
    }

    pub(crate) fn peer_message(&mut self, number: u64, second: bool, packet: Packet) {
        let Some((engine, link)) = self.hearer(number, second) else { return };
        self.count(4, u64::from(engine), number);
        self.stats.messages += 1;
        match packet.read_peer() {
            Ok(message) => {
                self.note(|_| format!("e{engine} hears on {link:?}: {}", short(&message)));
                self.with_owner(engine, |owner, now| owner.peer_message(link, message, now));
            }
            Err(error) => self.violates(Violation::Unreadable { engine, error }),
        }
        self.pump_owner(engine);
    }

    /// A session closes a link, after what it has sent on it.
    pub(crate) fn close(&mut self, engine: u32, link: LinkId) {
        let Some(number) = self.engines.get_mut(engine as usize).and_then(|e| e.links.remove(&link)) else { return };
        let at = self.arrival(number, engine, link);
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let first = Self::is_first(conn, engine, link);
        conn.ends[usize::from(!first)].open = false;
        if let Some(at) = at {
            self.queue.put(at, Happens::Closed(number, first));
        }
    }

    /// A connection breaks: either end hears of it in its own time.
    pub(crate) fn break_conn(&mut self, number: u64) {
        for second in [false, true] {
            let after = self.rng.time(us(1), ms(400));
            self.put(after, Happens::Closed(number, second));
        }
    }

    pub(crate) fn hears_close(&mut self, number: u64, second: bool) {
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let end = &mut conn.ends[usize::from(second)];
        let End { engine, life, link, open } = *end;
        end.open = false;
        if conn.ends.iter().all(|e| !e.open) {
            self.conns.remove(&number);
        }
        if !open || self.life(engine) != life {
            return;
        }
        self.count(5, u64::from(engine), number);
        if let Some(link) = link {
            if let Some(e) = self.engines.get_mut(engine as usize) {
                e.links.remove(&link);
            }
            self.note(|_| format!("e{engine} hears that {link:?} is closed"));
            self.with_owner(engine, |owner, now| owner.link_closed(link, "the connection broke", now));
            self.pump_owner(engine);
        }
    }

    /// An owner is connected to by something that says nothing.
    pub(crate) fn half_open(&mut self, from: u32, to: u32, lasts: Duration) {
        let number = self.next_conn;
        self.next_conn += 1;
        let rng = Rng::of(&[self.config.seed, 7, number]);
        let ends = [
            End { engine: from, life: u32::MAX, link: None, open: false },
            End { engine: to, life: self.life(to), link: None, open: true },
        ];
        self.conns.insert(number, Conn { ends, last: [self.now; 2], rng });
        self.put(us(1), Happens::Accept(number));
        self.put(lasts, Happens::Closed(number, true));
    }
}

/// As much of a message as a trace needs.
fn short(message: &PeerMessage) -> String {
    let text = format!("{message:?}");
    let kind: String = text.chars().take_while(|c| c.is_alphanumeric()).collect();
    match kind.as_str() {
        "Hello" | "Welcome" | "Manifest" => kind,
        _ => text.chars().take(220).collect(),
    }
}
