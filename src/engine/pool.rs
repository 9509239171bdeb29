//! A bounded pool of threads on which SQL runs, so that a slow query never holds up the async runtime.
//!
//! A query that panics ends alone. One that outlives its deadline inside a single function of SQLite's, where nothing can
//! stop it (`instr` of two long texts), is left behind: its caller is told, and another thread takes its thread's place.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::deadline::Deadline;
use super::{Connections, Limits, QueryError, QueryErrorKind, QueryResult};

/// `LIKE` calls itself once for each wildcard, of which a pattern may have 25,000: some 4 MiB.
const STACK_BYTES: usize = 16 << 20;
/// How long after its deadline a query is left behind, and how often that is looked at.
const GRACE: Duration = Duration::from_millis(150);
const LOOK_EVERY: Duration = Duration::from_millis(50);

type Work = Box<dyn FnOnce(&mut Connections) + Send>;
/// Tells the caller that its query is left behind.
type GiveUp = Box<dyn FnOnce() + Send>;

struct Job {
    work: Work,
    give_up: GiveUp,
}

struct Running {
    deadline: Deadline,
    give_up: GiveUp,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    /// By the number of the job.
    running: HashMap<u64, Running>,
    jobs: u64,
    threads: usize,
    /// Whether the last handle is gone.
    closed: bool,
    /// Whether the watcher waits to be woken.
    watcher_sleeps: bool,
}

#[derive(Default)]
struct Pool {
    state: Mutex<State>,
    job: Condvar,
    watcher: Condvar,
}

impl Pool {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread that takes jobs. Where the system gives none, the others do the work.
    fn start(self: &Arc<Self>, state: &mut State) {
        let pool = Arc::clone(self);
        let thread = thread::Builder::new().name("sql".to_owned()).stack_size(STACK_BYTES);
        if thread.spawn(move || pool.take_jobs()).is_ok() {
            state.threads += 1;
        }
    }

    fn take_jobs(&self) {
        let mut connections = Connections::default();
        let mut state = self.state();
        loop {
            let Some(job) = state.waiting.pop_front() else {
                if state.closed {
                    return;
                }
                state = self.job.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let number = state.jobs;
            state.jobs += 1;
            let running = Running {
                deadline: connections.deadline(),
                give_up: job.give_up,
            };
            state.running.insert(number, running);
            if std::mem::take(&mut state.watcher_sleeps) {
                self.watcher.notify_one();
            }
            drop(state);
            // A panic is one job's end, not the thread's; its connections may be in any state after it.
            if catch_unwind(AssertUnwindSafe(|| (job.work)(&mut connections))).is_err() {
                connections = Connections::default();
            }
            state = self.state();
            // Left behind: another thread has this one's place.
            if state.running.remove(&number).is_none() {
                return;
            }
        }
    }

    /// Leaves queries behind that do not end.
    fn watch(self: &Arc<Self>) {
        let mut state = self.state();
        while !state.closed {
            if state.running.is_empty() {
                state.watcher_sleeps = true;
                state = self.watcher.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waited = self.watcher.wait_timeout(state, LOOK_EVERY);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            let stuck = state.running.extract_if(|_, job| job.deadline.is_past(GRACE));
            for (_, job) in stuck.collect::<Vec<_>>() {
                (job.give_up)();
                state.threads -= 1;
                self.start(&mut state);
            }
        }
    }
}

/// Ends the threads when it goes.
struct Handle(Arc<Pool>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.state().closed = true;
        self.0.job.notify_all();
        self.0.watcher.notify_all();
    }
}

/// Handle to the pool; cloning shares it. The threads end when the last handle goes.
#[derive(Clone)]
pub struct Executor {
    handle: Arc<Handle>,
    limits: Limits,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let limits = ("limits", &self.limits);
        formatter
            .debug_struct("Executor")
            .field(limits.0, limits.1)
            .finish_non_exhaustive()
    }
}

impl Executor {
    /// Starts `threads` (at least one) threads, each with its own connections.
    pub fn new(threads: usize, limits: Limits) -> Self {
        let pool = Arc::new(Pool::default());
        let mut state = pool.state();
        for _ in 0..threads.max(1) {
            pool.start(&mut state);
        }
        drop(state);
        let watched = Arc::clone(&pool);
        // Without a watcher all works, but for queries that never end.
        let _ = thread::Builder::new()
            .name("sql-watcher".to_owned())
            .spawn(move || watched.watch());
        Executor {
            handle: Arc::new(Handle(pool)),
            limits,
        }
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Runs `work` on one of the threads with its connections; not at all where nobody waits for it any more.
    ///
    /// # Errors
    /// Where the pool has no thread, `work` panics, or a query of it does not end at its deadline.
    pub async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connections) -> T + Send + 'static,
    ) -> Result<T, QueryError> {
        let (answer, receive) = tokio::sync::oneshot::channel();
        // Whoever takes it first answers: the thread, or the watcher.
        let answer = Arc::new(Mutex::new(Some(answer)));
        let late = Arc::clone(&answer);
        let time = self.limits.time;
        let job = Job {
            work: Box::new(move |connections| {
                let is_waited_for = lock(&answer).as_ref().is_some_and(|answer| !answer.is_closed());
                if is_waited_for {
                    let result = work(connections);
                    if let Some(answer) = lock(&answer).take() {
                        let _ = answer.send(Ok(result));
                    }
                }
            }),
            give_up: Box::new(move || {
                if let Some(answer) = lock(&late).take() {
                    let _ = answer.send(Err(QueryError::timeout(time)));
                }
            }),
        };
        let fault = |reason: &str| QueryError::new(QueryErrorKind::Database, reason);
        let pool = &self.handle.0;
        {
            let mut state = pool.state();
            if state.threads == 0 {
                return Err(fault("the executor has no threads"));
            }
            state.waiting.push_back(job);
        }
        pool.job.notify_one();
        receive.await.map_err(|_| fault("the executor failed on this query"))?
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

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

    fn database() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sample.sqlite");
        rusqlite::Connection::open(&path)
            .and_then(|writer| writer.execute_batch("CREATE TABLE t (a)"))
            .unwrap();
        (folder, path)
    }

    #[tokio::test]
    async fn a_query_that_nothing_can_stop_is_left_behind() {
        let (_folder, path) = database();
        let time = Duration::from_millis(100);
        let executor = Executor::new(
            1,
            Limits {
                time,
                ..Limits::default()
            },
        );
        // Seconds within one function.
        let endless = "SELECT instr(hex(zeroblob(500000)), hex(zeroblob(250000)) || '1')";
        let started = Instant::now();
        let error = executor.run(path.clone(), endless.to_owned()).await.unwrap_err();
        assert_eq!(error, QueryError::timeout(time));
        assert!(executor.run(path, "SELECT 1".to_owned()).await.is_ok());
        assert!(started.elapsed() < time + Duration::from_millis(500));
    }

    #[tokio::test]
    async fn the_longest_pattern_fits_the_stack() {
        let (_folder, path) = database();
        let executor = Executor::new(1, Limits::default());
        for (like, any) in [("LIKE", '%'), ("GLOB", '*')] {
            let pattern = format!("{any}0").repeat(25_000);
            let sql = format!("SELECT hex(zeroblob(30000)) {like} '{pattern}'");
            let result = executor.run(path.clone(), sql).await.unwrap();
            assert_eq!(result.rows, [[crate::engine::Value::Integer(1)]]);
        }
    }

    #[test]
    fn threads_end_with_the_last_handle() {
        let executor = Executor::new(2, Limits::default());
        let pool = Arc::downgrade(&executor.handle.0);
        drop(executor.clone());
        assert!(pool.upgrade().is_some());
        drop(executor);
        let started = Instant::now();
        while pool.strong_count() > 0 {
            assert!(started.elapsed() < Duration::from_secs(5), "a thread goes on");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
