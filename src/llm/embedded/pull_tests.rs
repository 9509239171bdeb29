//! Pulls from a small server of our own that behaves, breaks off and lies.

use std::sync::Mutex;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

const CONTENT: &[u8] = b"not really a model, but it has a size and a digest all the same";

/// How the server answers.
#[derive(Clone, Copy)]
enum Manner {
    Honest,
    /// Half of what was asked for, then the connection closes.
    BreaksOff,
    /// All of the file, whatever range was asked for.
    IgnoresRange,
    OtherBytes,
    OtherSize,
}

/// Serves `CONTENT` in the given manners, one a request, the last one from then on; gives its address and the ranges
/// that it was asked for.
async fn serve(manners: &'static [Manner]) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let ranges = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&ranges);
    tokio::spawn(async move {
        for number in 0.. {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let head = String::from_utf8(head).unwrap().to_lowercase();
            let range = head
                .lines()
                .find_map(|line| line.strip_prefix("range: bytes="))
                .unwrap_or("")
                .to_owned();
            let start = range.trim_end_matches('-').parse().unwrap_or(0);
            seen.lock().unwrap().push(range);
            let manner = manners[manners.len().min(number + 1) - 1];
            let whole = match manner {
                Manner::OtherBytes => vec![b'x'; CONTENT.len()],
                Manner::OtherSize => vec![b'x'; 7],
                _ => CONTENT.to_vec(),
            };
            let start = if matches!(manner, Manner::IgnoresRange) {
                0
            } else {
                start
            };
            let body = &whole[start..];
            let status = if start == 0 { "200 OK" } else { "206 Partial Content" };
            let mut answer = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n",
                body.len()
            );
            if start > 0 {
                answer += &format!("Content-Range: bytes {start}-{}/{}\r\n", whole.len() - 1, whole.len());
            }
            answer += "\r\n";
            let sent = if matches!(manner, Manner::BreaksOff) {
                &body[..body.len() / 2]
            } else {
                body
            };
            stream.write_all(answer.as_bytes()).await.unwrap();
            stream.write_all(sent).await.unwrap();
            stream.shutdown().await.unwrap();
        }
    });
    (address, ranges)
}

fn entry(hosts: &[&str]) -> ModelEntry {
    let hub = |host: &&str| Source::Hub {
        host: (*host).to_owned(),
        repository: "someone/model".to_owned(),
        revision: "main".to_owned(),
        file: "m.gguf".to_owned(),
    };
    ModelEntry {
        name: "tiny".to_owned(),
        description: String::new(),
        license: "Apache-2.0".to_owned(),
        file: "m.gguf".to_owned(),
        size: CONTENT.len() as u64,
        sha256: hexadecimal(&Sha256::digest(CONTENT)),
        context: 1,
        sources: hosts.iter().map(hub).collect(),
    }
}

async fn pull_quietly(entry: &ModelEntry, folder: &Path, options: PullOptions) -> Result<PathBuf, PullError> {
    pull(entry, folder, options, &|_| ()).await
}

#[tokio::test]
async fn a_broken_download_goes_on_where_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let (address, ranges) = serve(&[Manner::BreaksOff, Manner::BreaksOff, Manner::Honest]).await;
    let entry = entry(&[&address]);
    let path = pull_quietly(&entry, folder.path(), PullOptions::default())
        .await
        .unwrap();
    assert_eq!(fs::read(&path).unwrap(), CONTENT);
    assert_eq!(*ranges.lock().unwrap(), ["", "31-", "47-"]);
    assert_eq!(ModelState::of(&entry, folder.path()), ModelState::Verified);
    assert!(!part_path(&path).exists());

    // Here now: no more requests, also offline; and a file that someone changed is noticed.
    pull_quietly(
        &entry,
        folder.path(),
        PullOptions {
            offline: true,
            ..PullOptions::default()
        },
    )
    .await
    .unwrap();
    assert_eq!(ranges.lock().unwrap().len(), 3);
    fs::write(&path, vec![b'x'; CONTENT.len()]).unwrap();
    assert_eq!(ModelState::of(&entry, folder.path()), ModelState::Unverified);
    pull_quietly(&entry, folder.path(), PullOptions::default())
        .await
        .unwrap();
    assert_eq!(fs::read(&path).unwrap(), CONTENT);
}

#[tokio::test]
async fn what_an_earlier_process_left_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let (address, ranges) = serve(&[Manner::Honest, Manner::IgnoresRange]).await;
    let entry = entry(&[&address]);
    let path = folder.path().join("m.gguf");
    for _ in 0..2 {
        fs::write(part_path(&path), &CONTENT[..10]).unwrap();
        assert_eq!(ModelState::of(&entry, folder.path()), ModelState::Partial(10));
        pull_quietly(&entry, folder.path(), PullOptions::default())
            .await
            .unwrap();
        assert_eq!(fs::read(&path).unwrap(), CONTENT);
        fs::remove_file(&path).unwrap();
    }
    assert_eq!(*ranges.lock().unwrap(), ["10-", "10-"]);

    // All of it came in, but it was never verified: no request at all.
    fs::write(part_path(&path), CONTENT).unwrap();
    pull_quietly(
        &entry,
        folder.path(),
        PullOptions {
            offline: true,
            ..PullOptions::default()
        },
    )
    .await
    .unwrap();
}

#[tokio::test]
async fn other_bytes_are_refused_and_the_next_source_is_tried() {
    let folder = tempfile::tempdir().unwrap();
    let (liar, _) = serve(&[Manner::OtherBytes]).await;
    let (short, _) = serve(&[Manner::OtherSize]).await;
    let (honest, _) = serve(&[Manner::Honest]).await;
    let error = pull_quietly(&entry(&[&liar, &short]), folder.path(), PullOptions::default())
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(&format!("expected `{}`", hexadecimal(&Sha256::digest(CONTENT)))),
        "{text}"
    );
    assert!(text.contains("offers a file of 7 bytes, expected 63"), "{text}");
    assert!(text.contains("--model-file") && text.contains("--base-url"), "{text}");
    assert_eq!(ModelState::of(&entry(&[]), folder.path()), ModelState::Absent);

    let events = Mutex::new(Vec::new());
    let note = |event| events.lock().unwrap().push(event);
    let path = pull(&entry(&[&liar, &honest]), folder.path(), PullOptions::default(), &note)
        .await
        .unwrap();
    assert_eq!(fs::read(path).unwrap(), CONTENT);
    let events = events.into_inner().unwrap();
    assert_eq!(
        events
            .iter()
            .filter(|event| matches!(event, PullEvent::FellThrough { .. }))
            .count(),
        1
    );
    assert!(events.contains(&PullEvent::Progress { done: 63, total: 63 }));
}

#[tokio::test]
async fn offline_and_interrupted_pulls_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let (address, ranges) = serve(&[Manner::Honest]).await;
    let entry = entry(&[&address]);
    let offline = PullOptions {
        offline: true,
        ..PullOptions::default()
    };
    assert!(matches!(
        pull_quietly(&entry, folder.path(), offline).await,
        Err(PullError::Offline { .. })
    ));

    fs::write(part_path(&folder.path().join("m.gguf")), &CONTENT[..10]).unwrap();
    let options = PullOptions::default();
    options.cancel.store(true, Ordering::Relaxed);
    let error = pull_quietly(&entry, folder.path(), options)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("10 of 63 bytes are kept"), "{error}");
    assert!(ranges.lock().unwrap().len() <= 1);
}

#[tokio::test]
async fn two_pulls_at_once_fetch_once() {
    let folder = tempfile::tempdir().unwrap();
    let (address, ranges) = serve(&[Manner::Honest]).await;
    let entry = entry(&[&address]);
    let one = pull_quietly(&entry, folder.path(), PullOptions::default());
    let two = pull_quietly(&entry, folder.path(), PullOptions::default());
    let (one, two) = tokio::join!(one, two);
    assert_eq!(one.unwrap(), two.unwrap());
    assert_eq!(ranges.lock().unwrap().len(), 1);
}
