//! A rail's orders: a queue that wakes its thread, and that has an end.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::bell::Bell;
use crate::shared::{Command, lock};

/// A rail's orders. There are never more than a few for each operation, peer and region, all of which are bounded.
pub(crate) struct Mailbox {
    queue: Mutex<Queue>,
    pub(crate) bell: Bell,
    asleep: AtomicBool,
}

#[derive(Default)]
struct Queue {
    orders: VecDeque<Command>,
    /// Its thread has ended: orders are dropped, and with them what they hold and who waits for their replies.
    closed: bool,
}

impl Mailbox {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self { queue: Mutex::default(), bell: Bell::new()?, asleep: AtomicBool::new(false) })
    }

    pub(crate) fn post(&self, command: Command) {
        let mut queue = lock(&self.queue);
        if queue.closed {
            // Not under the lock: what it holds may post in its turn.
            drop(queue);
            return drop(command);
        }
        queue.orders.push_back(command);
        drop(queue);
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.bell.ring();
        }
    }

    /// All orders, into an empty queue.
    pub(crate) fn take(&self, into: &mut VecDeque<Command>) {
        std::mem::swap(&mut lock(&self.queue).orders, into);
    }

    /// The rail is about to sleep: from now on a command rings. False if there is one already.
    ///
    /// Who posted may have seen the rail asleep and ring only after it woke up for another reason: so whoever finds the bell ringing
    /// silences it, before looking for orders.
    pub(crate) fn lie_down(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        let quiet = lock(&self.queue).orders.is_empty();
        if !quiet {
            self.wake_up();
        }
        quiet
    }

    /// The rail is awake.
    pub(crate) fn wake_up(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// The rail has ended.
    pub(crate) fn close(&self) {
        let mut queue = lock(&self.queue);
        queue.closed = true;
        let orders = std::mem::take(&mut queue.orders);
        drop(queue);
        drop(orders);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn no_order_is_slept_over_and_a_late_ring_is_heard_once() {
        const ORDERS: usize = 20_000;
        let mailbox = Mailbox::new().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..ORDERS).for_each(|key| mailbox.post(Command::Unmap { key: key as u64 })));
            let (mut got, mut orders) = (0, VecDeque::new());
            while got < ORDERS {
                mailbox.take(&mut orders);
                got += orders.drain(..).count();
                if mailbox.lie_down() {
                    // As the rail does: another source may wake it at any time.
                    let timeout = if got % 2 == 0 { Duration::from_micros(1) } else { Duration::from_secs(5) };
                    if mailbox.bell.wait(Some(timeout)) {
                        mailbox.bell.silence();
                    }
                }
                mailbox.wake_up();
            }
        });
        // What rang late is heard now, and then it is quiet.
        if mailbox.bell.wait(Some(Duration::ZERO)) {
            mailbox.bell.silence();
        }
        assert!(mailbox.lie_down() && !mailbox.bell.wait(Some(Duration::from_millis(1))));
        mailbox.wake_up();
        assert!(!mailbox.bell.wait(Some(Duration::from_millis(1))));
    }

    #[test]
    fn nobody_waits_for_a_mailbox_that_is_closed() {
        let mailbox = Mailbox::new().unwrap();
        let [(before, heard_before), (after, heard_after)] = [mpsc::sync_channel(1), mpsc::sync_channel(1)];
        mailbox.post(Command::Ping { reply: before });
        mailbox.close();
        mailbox.post(Command::Ping { reply: after });
        assert!(heard_before.recv().is_err() && heard_after.recv().is_err());
    }
}
