//! An engine that can end without a word.

use kvferry::Address;
use kvferry_transport::mem::MemNetwork;

use crate::by_hand::Engine;
use crate::running::{Running, SECOND};

/// An engine on a runtime of its own, that can end without a word: as its process would, all its sockets close at once.
#[derive(Debug)]
pub struct Mortal {
    /// The engine.
    pub engine: Running,
    runtime: tokio::runtime::Runtime,
}

impl Mortal {
    /// Starts one that listens there.
    ///
    /// # Panics
    /// Where something doesn't start.
    pub async fn start(id: &'static str, network: &MemNetwork, at: Address, shape: Engine) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (runtime, network) = (runtime.expect("a runtime"), network.clone());
        let started = runtime.spawn(async move { Running::start_as(id, &shape, &network, |o| o.listen(at)).await });
        Self { engine: started.await.expect("an engine"), runtime }
    }

    /// Shuts it down as it should be.
    pub async fn stop(self) {
        self.engine.stop().await;
        self.runtime.shutdown_background();
    }

    /// Kills it, and waits until its port is free.
    ///
    /// # Panics
    /// Where it is not on TCP.
    pub async fn kill(self) {
        let Address::Tcp(at) = self.engine.address() else { panic!("it listens on TCP") };
        self.runtime.shutdown_background();
        // Its ranks see their owner end, and end.
        drop(self.engine);
        // Its port is free when its driver is gone.
        while std::net::TcpListener::bind(at).is_err() {
            tokio::time::sleep(SECOND / 100).await;
        }
    }
}
