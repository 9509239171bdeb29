//! The model behind its cache: looks there first, stores what was answered, and lets identical requests in flight share
//! one call.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::BoxFuture;
use tokio::sync::watch;

use super::cache::{Cache, CacheError, CacheMode};
use super::{CallError, Completion, ErrorClass, Model, Request};

type Answer = Result<Completion, CallError>;

/// Looks into the cache before it asks.
pub struct CachedModel {
    inner: Arc<dyn Model>,
    cache: Cache,
    mode: CacheMode,
    flights: Mutex<HashMap<[u8; 32], watch::Receiver<Option<Answer>>>>,
}

impl CachedModel {
    pub fn new(inner: Arc<dyn Model>, cache: Cache, mode: CacheMode) -> Self {
        CachedModel {
            inner,
            cache,
            mode,
            flights: Mutex::default(),
        }
    }

    async fn run(&self, request: &Request) -> Answer {
        let key = request.key();
        loop {
            // Whoever comes first looks and asks; it is registered before it looks, so that nobody can miss both the flight
            // and what it has stored.
            let (flight, mut seen) = match self.join(key) {
                Joined::First(flight) => (flight, None),
                Joined::Later(receiver) => (None, Some(receiver)),
            };
            if let Some(receiver) = &mut seen {
                let shared = receiver
                    .wait_for(Option::is_some)
                    .await
                    .ok()
                    .and_then(|answer| answer.clone());
                match shared {
                    Some(Ok(completion)) if completion.is_whole() => return Ok(as_hit(completion)),
                    // A cut answer is no answer for others.
                    Some(Ok(_)) => return self.look_and_ask(key, request).await,
                    Some(Err(error)) => return Err(CallError { attempts: 0, ..error }),
                    // The first was dropped before it had an answer: somebody else asks.
                    None => continue,
                }
            }
            let answer = self.look_and_ask(key, request).await;
            if let Some(flight) = flight {
                flight.land(&answer);
            }
            return answer;
        }
    }

    async fn look_and_ask(&self, key: [u8; 32], request: &Request) -> Answer {
        if let Some(hit) = self.cache.get(&key).map_err(unusable)? {
            // Bought for this very call, before the run was interrupted: not a saving, but the call itself.
            if !request.origin.is_empty() && hit.origin.as_ref() == Some(&request.origin) {
                return Ok(hit.completion);
            }
            // Where everything is to be asked anew, what this run has asked already is new.
            let of_this_run = || {
                let run = request.origin.split_inclusive('/').next();
                hit.origin
                    .as_deref()
                    .zip(run)
                    .is_some_and(|(origin, run)| origin.starts_with(run))
            };
            if self.mode != CacheMode::Refresh || of_this_run() {
                return Ok(as_hit(hit.completion));
            }
        }
        // An answer that was cut is no answer for others, but this run has paid for it.
        let own_key = request.own_key(&key);
        if let Some(own_key) = &own_key
            && let Some(hit) = self.cache.get(own_key).map_err(unusable)?
        {
            return Ok(hit.completion);
        }
        if self.mode == CacheMode::ReadOnly {
            return Err(CallError::new(
                ErrorClass::NotCached,
                "not in the completion cache, and with --cache-mode read-only nothing is asked".into(),
            ));
        }
        // Nothing is bought that could not be kept.
        if let Some(error) = self.cache.broken() {
            return Err(unusable(error.clone()));
        }
        let completion = self.inner.complete(request).await?;
        let key = if completion.is_whole() { Some(key) } else { own_key };
        if let Some(key) = key
            && let Err(error) = self.cache.put(key, request, &completion).await
        {
            // It is paid for, so it is used; the next call ends the run.
            tracing::warn!("{error}");
        }
        Ok(completion)
    }

    fn join(&self, key: [u8; 32]) -> Joined<'_> {
        let mut flights = self.lock();
        if let Some(receiver) = flights.get(&key) {
            return Joined::Later(receiver.clone());
        }
        let (sender, receiver) = watch::channel(None);
        flights.insert(key, receiver);
        Joined::First(Some(Flight {
            model: self,
            key,
            sender,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<[u8; 32], watch::Receiver<Option<Answer>>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Joined<'a> {
    First(Option<Flight<'a>>),
    Later(watch::Receiver<Option<Answer>>),
}

/// A call that others may wait for; struck off when it ends, however it ends.
struct Flight<'a> {
    model: &'a CachedModel,
    key: [u8; 32],
    sender: watch::Sender<Option<Answer>>,
}

impl Flight<'_> {
    fn land(&self, answer: &Answer) {
        if self.sender.receiver_count() > 1 {
            self.sender.send_replace(Some(answer.clone()));
        }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.model.lock().remove(&self.key);
    }
}

fn as_hit(completion: Completion) -> Completion {
    Completion {
        cached: true,
        attempts: 0,
        ..completion
    }
}

fn unusable(error: CacheError) -> CallError {
    CallError::new(ErrorClass::Stopped, error.to_string())
}

impl Model for CachedModel {
    fn complete<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Answer> {
        Box::pin(self.run(request))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::super::tests::{completion, request};
    use super::*;

    /// Numbers its answers.
    #[derive(Default)]
    struct Counting {
        calls: AtomicU32,
        cut: bool,
    }

    impl Model for Counting {
        fn complete<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Answer> {
            Box::pin(async {
                let number = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
                tokio::time::sleep(Duration::from_millis(20)).await;
                Ok(Completion {
                    finish_reason: Some(if self.cut { "length" } else { "stop" }.into()),
                    ..completion(&format!("answer {number}"))
                })
            })
        }
    }

    fn cached(folder: &tempfile::TempDir, mode: CacheMode, inner: &Arc<Counting>) -> CachedModel {
        let path = folder.path().join("completions.sqlite");
        let cache = match mode {
            CacheMode::ReadOnly => Cache::open_to_read(&path),
            _ => Cache::open(&path),
        };
        CachedModel::new(inner.clone(), cache.unwrap(), mode)
    }

    #[tokio::test]
    async fn identical_requests_in_flight_share_one_call() {
        let folder = tempfile::tempdir().unwrap();
        let inner = Arc::new(Counting::default());
        let model = cached(&folder, CacheMode::On, &inner);
        let request = request();
        let answers = futures::future::join_all((0..20).map(|_| model.complete(&request))).await;
        assert_eq!(inner.calls.load(Ordering::SeqCst), 1);
        let paid = answers.iter().filter(|answer| !answer.as_ref().unwrap().cached).count();
        assert_eq!(paid, 1, "one is the call, the others are hits");
        assert!(model.lock().is_empty());
        assert!(model.complete(&request).await.unwrap().cached);
    }

    /// The one that asks may be dropped; whoever waits for it must not wait for ever.
    #[tokio::test]
    async fn where_the_first_is_dropped_another_asks() {
        let folder = tempfile::tempdir().unwrap();
        let inner = Arc::new(Counting::default());
        let model = cached(&folder, CacheMode::On, &inner);
        let request = request();
        let mut first = model.complete(&request);
        assert!(futures::poll!(&mut first).is_pending());
        let mut second = model.complete(&request);
        assert!(futures::poll!(&mut second).is_pending());
        drop(first);
        assert_eq!(second.await.unwrap().text, "answer 2");
    }

    #[tokio::test]
    async fn modes() {
        let folder = tempfile::tempdir().unwrap();
        let inner = Arc::new(Counting::default());
        let request = request();
        let on = cached(&folder, CacheMode::On, &inner);
        assert_eq!(on.complete(&request).await.unwrap().text, "answer 1");
        let replay = cached(&folder, CacheMode::ReadOnly, &inner);
        assert_eq!(replay.complete(&request).await.unwrap().text, "answer 1");
        let mut other = request.clone();
        other.repeat = 1;
        assert_eq!(replay.complete(&other).await.unwrap_err().class, ErrorClass::NotCached);
        let refresh = cached(&folder, CacheMode::Refresh, &inner);
        let renewed = refresh.complete(&request).await.unwrap();
        assert_eq!((renewed.text.as_str(), renewed.cached), ("answer 2", false));
        assert_eq!(on.complete(&request).await.unwrap().text, "answer 2");
    }

    #[tokio::test]
    async fn what_an_interrupted_run_had_bought_is_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let inner = Arc::new(Counting::default());
        let mut request = request();
        request.origin = "run 1/q1".into();
        let model = cached(&folder, CacheMode::On, &inner);
        model.complete(&request).await.unwrap();
        // The run goes on: it is as if the call were made now.
        let again = model.complete(&request).await.unwrap();
        assert!(!again.cached);
        assert_eq!(again.attempts, 1);
        // Even where everything is to be asked anew.
        let refresh = cached(&folder, CacheMode::Refresh, &inner);
        assert_eq!(refresh.complete(&request).await.unwrap().text, "answer 1");
        request.origin = "run 2/q1".into();
        assert!(model.complete(&request).await.unwrap().cached);
        assert_eq!(inner.calls.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn cut_answers_are_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let inner = Arc::new(Counting {
            cut: true,
            ..Counting::default()
        });
        let model = cached(&folder, CacheMode::On, &inner);
        let mut request = request();
        model.complete(&request).await.unwrap();
        assert_eq!(model.complete(&request).await.unwrap().text, "answer 2");
        // But a run that is interrupted does not pay for its own twice.
        request.origin = "run 1/q1".into();
        assert_eq!(model.complete(&request).await.unwrap().text, "answer 3");
        assert_eq!(model.complete(&request).await.unwrap().text, "answer 3");
        request.origin = "run 2/q1".into();
        assert_eq!(model.complete(&request).await.unwrap().text, "answer 4");
    }

    #[tokio::test]
    async fn what_is_paid_for_is_used_though_it_cannot_be_stored() {
        let folder = tempfile::tempdir().unwrap();
        let inner = Arc::new(Counting::default());
        let model = cached(&folder, CacheMode::On, &inner);
        rusqlite::Connection::open(model.cache.path())
            .unwrap()
            .execute_batch(
                "CREATE TRIGGER full BEFORE INSERT ON completions BEGIN SELECT RAISE(FAIL, 'disk full'); END",
            )
            .unwrap();
        let request = request();
        assert_eq!(model.complete(&request).await.unwrap().text, "answer 1");
        let error = model.complete(&request).await.unwrap_err();
        assert_eq!(error.class, ErrorClass::Stopped);
        assert!(error.message.contains("disk full"), "{}", error.message);
        assert_eq!(inner.calls.load(Ordering::SeqCst), 1);
    }
}
