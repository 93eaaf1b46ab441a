//! Results to a table and pictures.
