//! A bounded pool of threads on which SQL runs, so that a slow query never holds up the async runtime.

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
                        Ok(job) => job(&mut connections),
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

    /// Runs `work` on one of the threads with its connections.
    ///
    /// # Errors
    /// Only where the pool has no thread left.
    pub async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connections) -> T + Send + 'static,
    ) -> Result<T, QueryError> {
        let (answer, receive) = tokio::sync::oneshot::channel();
        let gone = || QueryError::new(QueryErrorKind::Database, "the executor's threads have ended");
        self.jobs
            .send(Box::new(move |connections| {
                let _ = answer.send(work(connections));
            }))
            .map_err(|_| gone())?;
        receive.await.map_err(|_| gone())
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
