//! Models.

use std::path::PathBuf;

/// Looks a model file up in the folder `EVERGRAPH_MODELS`, else in `models` here or in a folder above.
#[must_use]
pub fn find_file(name: &str) -> Option<PathBuf> {
    let mut folders: Vec<PathBuf> = std::env::var_os("EVERGRAPH_MODELS").map(PathBuf::from).into_iter().collect();
    if let Ok(here) = std::env::current_dir() {
        folders.extend(here.ancestors().map(|folder| folder.join("models")));
    }
    folders.into_iter().map(|folder| folder.join(name)).find(|path| path.is_file())
}
