//! Models over several devices.

use super::{data, evergraph, fails, works};

/// Layers over devices: the same tokens and logits, each device with memory of its own.
#[test]
fn models_go_over_several_devices() {
    for name in ["gemma4-moe.gguf", "deepseek-v4.gguf"] {
        let model = data(name);
        let run = |more: &[&str]| {
            let words = ["run", "-m", &model, "--tokens", "1,2,3,4,5", "-n", "6", "--temp", "0", "--ignore-eos"];
            works(&[&words, &["--device", "host"][..], more].concat())
        };
        let one = run(&[]);
        assert_eq!(one["devices"], 1);
        for more in [
            &["--devices", "2"][..],
            &["--devices", "3", "-sm", "layer", "--pool", "slab"],
            &["--devices", "2", "-ts", "1,3", "--graphs", "off"],
            &["--devices", "2", "-sm", "none", "-mg", "1"],
            &["--devices", "2", "-cmoe"],
            &["--devices", "2", "-ncmoe", "1,1"],
        ] {
            let several = run(more);
            assert_eq!(several["tokens"], one["tokens"], "{name} {more:?}");
            assert_eq!(several["pool"]["devices"].as_array().unwrap().len(), several["devices"], "{name} {more:?}");
        }
        let two = run(&["--devices", "2", "-sm", "none", "-mg", "1"]);
        let layers = two["placement"]["layers"].as_array().unwrap();
        assert!(layers.iter().all(|device| *device == 1) && two["placement"]["output"] == 1, "{two}");
        let logits = |more: &[&str]| {
            let words = ["logits", "-m", &model, "--tokens", "1,2,3,4,5", "--device", "host", "--act", "f32"];
            works(&[&words, more].concat())["last_logits"].clone()
        };
        assert!(logits(&[]) == logits(&["--devices", "4"]), "{name}");
    }
}

#[test]
fn devices_and_shares_that_are_not_there_are_refused() {
    let model = data("gemma3.gguf");
    let base = ["run", "-m", &model, "--tokens", "1", "-n", "1", "--device", "host"];
    let refused = |more: &[&str], status| fails(&[&base, more].concat(), status);
    assert!(refused(&["--devices", "2", "-sm", "row"], 1).contains("-sm row"));
    assert!(refused(&["--devices", "2", "-sm", "tensor"], 1).contains("-sm layer"));
    assert!(refused(&["-sm", "row"], 2).contains("-sm: expected none or layer"));
    assert!(refused(&["-mg", "1"], 2).contains("-mg"));
    assert!(refused(&["--devices", "2", "-mg", "2"], 2).contains("0 to 1"));
    assert!(refused(&["--devices", "2", "-ts", "1,1,1"], 2).contains("-ts"));
    assert!(refused(&["--devices", "2", "-ts", "1,x"], 2).contains("no share"));
    assert!(refused(&["--devices", "2", "-ncmoe", "1,2,3"], 2).contains("-ncmoe"));
    assert!(refused(&["--devices", "0"], 2).contains("--devices"));
    assert!(refused(&["--plan", "pdf"], 2).contains("--plan"));
}

/// The plan is a result: nothing runs.
#[test]
fn plans_are_printed() {
    let model = data("gemma4-e.gguf");
    let base = ["run", "-m", &model, "--tokens", "1,2,3", "--device", "host", "--devices", "2", "--plan"];
    let printed = |more: &[&str]| {
        let output = evergraph(&[&base, more].concat());
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let text = printed(&["text"]);
    assert!(text.contains("a prompt of 3 tokens") && text.contains("one token"), "{text}");
    assert!(text.contains("peer_copy from device 0") && text.contains("attention_heads"), "{text}");
    let dot = printed(&["dot"]);
    assert!(dot.matches("digraph").count() == 2 && dot.contains("cluster_1"), "{dot}");
    for json in [printed(&["json"]), printed(&["json", "--json"])] {
        let document: serde_json::Value = serde_json::from_str(&json).unwrap();
        let steps = document["decode"]["steps"].as_array().unwrap();
        let copies = steps.iter().filter(|step| step["crosses"] == true);
        assert!(copies.clone().count() >= 2, "the residual, the positions");
        for step in steps.iter().filter(|step| step["crosses"] == false) {
            let here = |list: &serde_json::Value| {
                list.as_array().unwrap().iter().all(|tensor| tensor["device"] == step["device"])
            };
            assert!(here(&step["reads"]) && here(&step["writes"]), "{step}");
        }
    }
}
