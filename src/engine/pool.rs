//! A bounded pool of threads on which SQL runs, so that a slow query never holds up the async runtime.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use super::{Connections, Limits, QueryError, QueryErrorKind, QueryResult};

type Job = Box<dyn FnOnce(&mut Connections) + Send>;

/// Handle to the pool; cloning shares it. The threads end when the last handle goes.
#[derive(Debug, Clone)]
pub struct Executor {
    jobs: mpsc::Sender<Job>,
    limits: Limits,
}

impl Executor {
    /// Starts `threads` (at least one) threads, each with its own connections.
    pub fn new(threads: usize, limits: Limits) -> Self {
        let (jobs, queue) = mpsc::channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        for number in 0..threads.max(1) {
            let queue = Arc::clone(&queue);
            let work = move || {
                let mut connections = Connections::default();
                loop {
                    let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    match job {
                        // A panic is one job's end, not the thread's; its connections may be in any state after it.
                        Ok(job) => {
                            if catch_unwind(AssertUnwindSafe(|| job(&mut connections))).is_err() {
                                connections = Connections::default();
                            }
                        }
                        Err(_) => break,
                    }
                }
            };
            // Where a thread cannot be started, the others do the work; where none can, `run` says so.
            let _ = thread::Builder::new().name(format!("sql-{number}")).spawn(work);
        }
        Executor { jobs, limits }
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Runs `work` on one of the threads with its connections; not at all where nobody waits for it any more.
    ///
    /// # Errors
    /// Only where the pool has no thread, or `work` panics.
    pub async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connections) -> T + Send + 'static,
    ) -> Result<T, QueryError> {
        let (answer, receive) = tokio::sync::oneshot::channel();
        let fault = |reason: &str| QueryError::new(QueryErrorKind::Database, reason);
        self.jobs
            .send(Box::new(move |connections| {
                if !answer.is_closed() {
                    let _ = answer.send(work(connections));
                }
            }))
            .map_err(|_| fault("the executor has no threads"))?;
        receive.await.map_err(|_| fault("the executor failed on this query"))
    }

    /// Runs one query under the pool's limits.
    ///
    /// # Errors
    /// See [`QueryErrorKind`].
    pub async fn run(&self, path: PathBuf, sql: String) -> Result<QueryResult, QueryError> {
        let limits = self.limits;
        self.call(move |connections| connections.get(&path)?.query(&sql, &limits))
            .await?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_ends_one_job_only() {
        let executor = Executor::new(1, Limits::default());
        for _ in 0..3 {
            let error = executor.call::<()>(|_| panic!("a job that panics")).await.unwrap_err();
            assert_eq!(error.kind, QueryErrorKind::Database);
            assert_eq!(error.message, "the executor failed on this query");
        }
        assert_eq!(executor.call(|_| 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn a_job_that_nobody_waits_for_is_skipped() {
        let executor = Executor::new(1, Limits::default());
        let (go, gate) = mpsc::channel::<()>();
        let (ran, seen) = mpsc::channel();
        let held = tokio::spawn({
            let executor = executor.clone();
            async move { executor.call(move |_| gate.recv()).await }
        });
        tokio::task::yield_now().await;
        let waiting = tokio::spawn({
            let executor = executor.clone();
            async move { executor.call(move |_| ran.send(()).is_ok()).await }
        });
        tokio::task::yield_now().await;
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        go.send(()).unwrap();
        assert!(held.await.unwrap().unwrap().is_ok());
        executor.call(|_| ()).await.unwrap();
        assert!(seen.try_recv().is_err());
    }
}
