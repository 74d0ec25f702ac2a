// transformers.js on a bundle. In Node: reads texts from standard input, writes the answers as its last line; the argument is
// the folder with node_modules. The page in Chromium imports only `classify`. See interop.py.

const DTYPES = { fp32: "fp32", int8: "q8" }; // onnx/model.onnx and onnx/model_quantized.onnx

// Answers by variant: for each text a list of [place, label, score].
export async function classify(library, model, { task, texts, variants }) {
  library.env.allowLocalModels = true;
  library.env.allowRemoteModels = false;
  library.env.useFSCache = false;
  library.env.useBrowserCache = false;
  const answers = {};
  for (const variant of variants) {
    const classifier = await library.pipeline(task, model, {
      dtype: DTYPES[variant],
      session_options: { intraOpNumThreads: 1 },
    });
    answers[variant] = [];
    for (const text of texts) {
      const found =
        task === "token-classification" ? await classifier(text, { ignore_labels: [] }) : await classifier(text);
      answers[variant].push(found.map((each) => [each.index ?? 0, each.entity ?? each.label, each.score]));
    }
    await classifier.dispose();
  }
  return answers;
}

async function main(folder) {
  const { createRequire } = await import("node:module");
  const { mkdtempSync, readFileSync, rmSync, symlinkSync } = await import("node:fs");
  const { tmpdir } = await import("node:os");
  const path = await import("node:path");
  const inFolder = createRequire(path.resolve(folder, "package.json"));
  const library = inFolder("@huggingface/transformers");
  const asked = JSON.parse(readFileSync(0, "utf-8"));
  library.env.fetch = (address) => {
    throw new Error(`asked the network for ${address}`);
  };
  // The library accepts only names that the Hub allows, so the bundle is linked under another name.
  library.env.localModelPath = mkdtempSync(path.join(tmpdir(), "interop-"));
  symlinkSync(asked.bundle, path.join(library.env.localModelPath, "bundle"));
  let answers;
  try {
    answers = await classify(library, "bundle", asked);
  } finally {
    rmSync(library.env.localModelPath, { recursive: true });
  }
  const versions = { node: process.versions.node, "@huggingface/transformers": library.env.version };
  versions["onnxruntime-node"] = library.env.backends.onnx.versions.node ?? library.env.backends.onnx.versions.common;
  console.log(JSON.stringify({ versions, answers }));
}

if (typeof process !== "undefined") await main(process.argv[2]);
