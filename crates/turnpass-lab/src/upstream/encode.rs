//! Content codings, one flush for each event, so that an encoded stream still streams.

use async_compression::tokio::write::{BrotliEncoder, GzipEncoder, ZlibEncoder, ZstdEncoder};
use tokio::io::AsyncWriteExt as _;

use crate::scenario::Coding;

enum Stage {
    Gzip(Box<GzipEncoder<Vec<u8>>>),
    Br(Box<BrotliEncoder<Vec<u8>>>),
    Zstd(Box<ZstdEncoder<Vec<u8>>>),
    Deflate(Box<ZlibEncoder<Vec<u8>>>),
}

/// A chain of encoders; with none of them bytes pass through.
pub(crate) struct Encoder {
    stages: Vec<Stage>,
}

impl Encoder {
    pub(crate) fn new(codings: &[Coding]) -> Self {
        let stage = |coding: &Coding| match coding {
            Coding::Gzip => Stage::Gzip(Box::new(GzipEncoder::new(Vec::new()))),
            Coding::Br => Stage::Br(Box::new(BrotliEncoder::new(Vec::new()))),
            Coding::Zstd => Stage::Zstd(Box::new(ZstdEncoder::new(Vec::new()))),
            Coding::Deflate => Stage::Deflate(Box::new(ZlibEncoder::new(Vec::new()))),
        };
        Self {
            stages: codings.iter().map(stage).collect(),
        }
    }

    pub(crate) fn is_identity(&self) -> bool {
        self.stages.is_empty()
    }

    /// Encodes and flushes; `last` also writes the ends of the formats. The sinks are vectors, so this never waits.
    pub(crate) async fn push(&mut self, bytes: &[u8], last: bool) -> std::io::Result<Vec<u8>> {
        let mut bytes = bytes.to_vec();
        for stage in &mut self.stages {
            macro_rules! run {
                ($encoder:expr) => {{
                    $encoder.write_all(&bytes).await?;
                    match last {
                        true => $encoder.shutdown().await?,
                        false => $encoder.flush().await?,
                    }
                    bytes = std::mem::take($encoder.get_mut());
                }};
            }
            match stage {
                Stage::Gzip(encoder) => run!(encoder),
                Stage::Br(encoder) => run!(encoder),
                Stage::Zstd(encoder) => run!(encoder),
                Stage::Deflate(encoder) => run!(encoder),
            }
        }
        Ok(bytes)
    }
}

/// Undoes the codings of a request body; `None` if it is not what its header says or grows beyond `limit`.
pub(crate) async fn decode(bytes: &[u8], codings: &str, limit: u64) -> Option<Vec<u8>> {
    use async_compression::tokio::bufread::{BrotliDecoder, GzipDecoder, ZlibDecoder, ZstdDecoder};
    use tokio::io::AsyncReadExt as _;

    let mut bytes = bytes.to_vec();
    for coding in codings.split(',').map(str::trim).rev() {
        if coding.is_empty() || coding == "identity" {
            continue;
        }
        let mut decoded = Vec::new();
        let input = bytes.as_slice();
        let read = match Coding::from_name(coding)? {
            Coding::Gzip => {
                GzipDecoder::new(input)
                    .take(limit + 1)
                    .read_to_end(&mut decoded)
                    .await
            }
            Coding::Br => {
                BrotliDecoder::new(input)
                    .take(limit + 1)
                    .read_to_end(&mut decoded)
                    .await
            }
            Coding::Zstd => {
                ZstdDecoder::new(input)
                    .take(limit + 1)
                    .read_to_end(&mut decoded)
                    .await
            }
            Coding::Deflate => {
                ZlibDecoder::new(input)
                    .take(limit + 1)
                    .read_to_end(&mut decoded)
                    .await
            }
        };
        read.ok()?;
        if decoded.len() as u64 > limit {
            return None;
        }
        bytes = decoded;
    }
    Some(bytes)
}
