//! Flags, environment and project file, resolved to plain paths and values.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use include_dir::{Dir, include_dir};

use super::arguments::{ExecutionArguments, Global, SelectionArguments};
use super::exit::{Exit, Failure};
use crate::config::{
    Override, Pipeline, Price, PriceFile, ProjectSettings, load_pipeline, load_prices, load_project, shipped_prices,
};
use crate::dataset::{self, Dataset, Dialect, LoadOptions, Source};
use crate::diagnostic::did_you_mean;
use crate::engine::{Executor, Limits, build_database};
use crate::prompt::{Prompts, TemplateStore};

static PIPELINES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/pipelines");
static DATASETS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/datasets");
const PROJECT_FILE: &str = "dinsql.yaml";

/// Where things are.
pub struct Settings {
    pub project: ProjectSettings,
    /// Folder of the project file: its paths are relative to it.
    pub root: PathBuf,
    pub store: TemplateStore,
    pipelines: Option<PathBuf>,
    dataset_folders: Vec<PathBuf>,
    pub runs: PathBuf,
    pub cache: PathBuf,
}

impl Settings {
    /// Flags beat the environment, which beats the project file, which beats what is shipped.
    pub fn resolve(global: &Global) -> Result<Self, Failure> {
        let (file, asked) = match &global.config {
            Some(file) => (file.clone(), true),
            None => (PathBuf::from(PROJECT_FILE), false),
        };
        let project = match std::fs::read(&file) {
            Ok(bytes) => load_project(&file.display().to_string(), &bytes)?,
            Err(error) if asked => {
                return Err(Failure::message(
                    Exit::Usage,
                    format!("cannot read {}: {error}", file.display()),
                ));
            }
            Err(_) => ProjectSettings::default(),
        };
        // Paths in the project file are relative to it.
        let root = file.parent().map(Path::to_owned).unwrap_or_default();
        let of_project = |path: &Option<PathBuf>| path.as_ref().map(|path| root.join(path));
        let existing = |name: &str| Some(PathBuf::from(name)).filter(|path| path.is_dir());
        for (flag, folder) in [
            ("--prompts-dir", &global.prompts_dir),
            ("--pipelines-dir", &global.pipelines_dir),
        ] {
            if let Some(folder) = folder
                && !folder.is_dir()
            {
                return Err(Failure::message(
                    Exit::Usage,
                    format!("{flag} {}: no such folder", folder.display()),
                ));
            }
        }
        let prompts = global
            .prompts_dir
            .clone()
            .or_else(|| of_project(&project.prompts))
            .or_else(|| existing("prompts"));
        let pipelines = global
            .pipelines_dir
            .clone()
            .or_else(|| of_project(&project.pipelines))
            .or_else(|| existing("pipelines"));
        let mut dataset_folders = global.datasets_dir.clone();
        dataset_folders.extend(project.datasets.iter().map(|folder| root.join(folder)));
        dataset_folders.extend(existing("datasets"));
        let cache = global
            .cache
            .clone()
            .or_else(|| of_project(&project.cache))
            .or_else(|| dirs::cache_dir().map(|folder| folder.join("dinsql")))
            .ok_or_else(|| {
                Failure::message(Exit::Failed, "no cache folder: neither HOME nor XDG_CACHE_HOME is set")
                    .hint("name one with --cache")
            })?;
        let runs = global
            .runs_dir
            .clone()
            .or_else(|| of_project(&project.runs))
            .unwrap_or_else(|| "runs".into());
        Ok(Settings {
            root,
            store: prompts.map_or(TemplateStore::Embedded, TemplateStore::Folder),
            project,
            pipelines,
            dataset_folders,
            runs,
            cache,
        })
    }

    /// The file of the completion cache.
    pub fn completions(&self) -> PathBuf {
        self.cache.join("completions.sqlite")
    }

    /// What models cost: a project's own price file before what is shipped.
    pub fn prices(&self) -> Result<Prices, Failure> {
        let own = match &self.project.prices {
            None => None,
            Some(file) => {
                let path = self.root.join(file);
                let bytes = std::fs::read(&path).map_err(|error| {
                    Failure::message(
                        Exit::Usage,
                        format!("cannot read the price file {}: {error}", path.display()),
                    )
                })?;
                Some(load_prices(&path.display().to_string(), &bytes)?)
            }
        };
        Ok(Prices {
            own,
            shipped: shipped_prices(),
        })
    }

    pub fn prompts(&self) -> Arc<Prompts> {
        Arc::new(Prompts::new(self.store.clone()))
    }

    /// The pipeline of a name or path, with its `--set` changes.
    pub fn pipeline(&self, name: &str, set: &[String]) -> Result<Pipeline, Failure> {
        let overrides: Vec<Override> = set
            .iter()
            .map(|text| Override::parse(text))
            .collect::<Result<_, _>>()
            .map_err(Failure::usage)?;
        let path = Path::new(name);
        let is_path = name.contains('/')
            || path
                .extension()
                .is_some_and(|extension| extension == "yaml" || extension == "yml");
        let (file, bytes) = if is_path {
            let bytes = std::fs::read(path)
                .map_err(|error| Failure::message(Exit::Usage, format!("cannot read the pipeline {name}: {error}")))?;
            (name.to_owned(), bytes)
        } else {
            self.named_pipeline(name)?
        };
        Ok(load_pipeline(&file, &bytes, &overrides, &self.store)?)
    }

    fn named_pipeline(&self, name: &str) -> Result<(String, Vec<u8>), Failure> {
        let file = format!("{name}.yaml");
        let found = match &self.pipelines {
            Some(folder) => {
                let path = folder.join(&file);
                std::fs::read(&path)
                    .ok()
                    .map(|bytes| (path.display().to_string(), bytes))
            }
            None => PIPELINES
                .get_file(&file)
                .map(|found| (format!("pipelines/{file}"), found.contents().to_vec())),
        };
        found.ok_or_else(|| {
            let known = self.pipeline_names();
            let place = self
                .pipelines
                .as_ref()
                .map_or("those shipped".into(), |folder| folder.display().to_string());
            let failure = Failure::message(
                Exit::Usage,
                format!("no pipeline `{name}` in {place} (there are: {})", known.join(", ")),
            );
            match did_you_mean(name, known.iter().map(String::as_str)) {
                Some(near) => failure.hint(format!("did you mean `{near}`?")),
                None => failure.hint("give a name, or the path of a YAML file"),
            }
        })
    }

    pub fn pipeline_names(&self) -> Vec<String> {
        let stem = |path: &Path| {
            path.extension()
                .is_some_and(|extension| extension == "yaml")
                .then(|| path.file_stem().map(|stem| stem.to_string_lossy().into_owned()))?
        };
        let mut names: Vec<String> = match &self.pipelines {
            Some(folder) => std::fs::read_dir(folder)
                .into_iter()
                .flatten()
                .flatten()
                .filter_map(|entry| stem(&entry.path()))
                .collect(),
            None => PIPELINES.files().filter_map(|file| stem(file.path())).collect(),
        };
        names.sort();
        names
    }

    /// Manifests that are shipped, laid out in the cache folder so that their paths are real files.
    pub fn shipped_datasets(&self) -> Result<Vec<(String, PathBuf)>, Failure> {
        let mut hasher = blake3::Hasher::new();
        let mut open = vec![&DATASETS];
        let mut files = Vec::new();
        while let Some(folder) = open.pop() {
            open.extend(folder.dirs());
            for file in folder.files() {
                hasher.update(file.path().to_string_lossy().as_bytes());
                hasher.update(file.contents());
                files.push(file);
            }
        }
        let root = self.cache.join("datasets").join(&hasher.finalize().to_hex()[..16]);
        if !root.is_dir() {
            let fail = |error: std::io::Error| {
                Failure::message(Exit::Failed, format!("cannot write {}: {error}", root.display()))
            };
            let unfinished = root.with_extension(format!("{}.unfinished", std::process::id()));
            for file in &files {
                let path = unfinished.join(file.path());
                if let Some(parent) = path.parent() {
                    std::fs::create_dir_all(parent).map_err(fail)?;
                }
                std::fs::write(&path, file.contents()).map_err(fail)?;
            }
            // Another process may have been faster.
            if std::fs::rename(&unfinished, &root).is_err() {
                let _ = std::fs::remove_dir_all(&unfinished);
            }
        }
        let manifests = DATASETS
            .files()
            .filter(|file| file.path().extension().is_some_and(|extension| extension == "yaml"));
        Ok(manifests
            .filter_map(|file| {
                Some((
                    file.path().file_stem()?.to_string_lossy().into_owned(),
                    root.join(file.path()),
                ))
            })
            .collect())
    }

    pub fn dataset_folders(&self) -> &[PathBuf] {
        &self.dataset_folders
    }

    pub fn source(&self, data: &str) -> Result<Source, Failure> {
        Ok(dataset::resolve(
            data,
            &self.dataset_folders,
            &self.shipped_datasets()?,
        )?)
    }

    /// Loads a dataset. Databases that are there only as a `.sql` text are built, in the cache folder.
    pub fn load(&self, source: &Source, language: Option<&str>, split: Option<&str>) -> Result<Dataset, Failure> {
        let options = LoadOptions {
            language: language.map(str::to_owned),
            split: split.map(str::to_owned),
        };
        let mut dataset = dataset::load(source, &options)?;
        self.build_databases(&mut dataset)?;
        if dataset.dialect != Dialect::Sqlite {
            eprintln!(
                "warning: dataset `{}` is written for {}, but its SQL runs on SQLite",
                dataset.name,
                dataset.dialect.name()
            );
        }
        Ok(dataset)
    }

    pub fn build_databases(&self, dataset: &mut Dataset) -> Result<(), Failure> {
        for database in dataset.databases.values_mut() {
            let text = database.path.with_extension("sql");
            if !database.path.exists() && text.is_file() {
                database.path = build_database(&text, &self.cache.join("databases"))?;
            }
        }
        Ok(())
    }

    /// The selected examples of a loaded dataset.
    pub fn select(dataset: &mut Dataset, arguments: &SelectionArguments) -> Result<(), Failure> {
        dataset.examples = arguments.selection().apply(std::mem::take(&mut dataset.examples))?;
        Ok(())
    }
}

/// The price lists of a project.
#[derive(Debug, Clone)]
pub struct Prices {
    own: Option<PriceFile>,
    shipped: PriceFile,
}

impl Prices {
    pub fn find(&self, model: &str) -> Option<Price> {
        self.own
            .as_ref()
            .and_then(|own| own.find(model))
            .or_else(|| self.shipped.find(model))
            .map(|entry| entry.price)
    }
}

/// The pool of SQL threads that the arguments ask for.
pub fn executor(arguments: &ExecutionArguments) -> Result<Executor, Failure> {
    let seconds = arguments.sql_timeout;
    if !(seconds.is_finite() && seconds > 0.0 && seconds <= 86_400.0) {
        return Err(Failure::message(
            Exit::Usage,
            format!("--sql-timeout {seconds}: expected seconds between 0 and 86400"),
        ));
    }
    let limits = Limits {
        time: std::time::Duration::from_secs_f64(seconds),
        ..Limits::default()
    };
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    Ok(Executor::new(
        arguments.sql_threads.unwrap_or(cores).clamp(1, 256),
        limits,
    ))
}
