// The words of the page, and an example.

export const WORDS = {
  en: {
    name: "English",
    lead: "One prompt, answered twice: by full prefill, and by blending the stored KV of its passages.",
    from: "Passages", fromCollection: "from the collection", fromPassages: "pasted here",
    passages: "Passages", hint: "An empty line between two passages. Each is stored as a document of its own.",
    question: "Question", compare: "Compare", stop: "Stop", example: "Example", tokens: "most tokens",
    key: "This server has a key", useKey: "Use it", keyHint: "It stays in the memory of this page.",
    full: "Full prefill", blend: "Blend", toFirst: "to the first token",
    prompt: "The prompt", reused: "reused", recomputed: "recomputed", computed: "computed", hit: "reused", miss: "computed",
    sources: "Sources", tiers: "Stored KV", tier: "tier", chunks: "chunks", held: "holds", room: "room for",
    storing: "Storing passage {0} of {1} …", answering: "{0} …", done: "Done.", stopped: "Stopped.",
    sooner: "The blend's first token came {0}x sooner.", later: "Full prefill's first token came {0}x sooner.",
    notBlended: "Nothing was blended; see the reasons below.",
    sameAnswer: "Both answers are the same.", otherAnswer: "The answers differ.",
    noPassages: "Paste a passage, or ask the example.", notStored: "The passages were not stored:",
    cutOff: "The server ended the answer early.", noServer: "The server does not answer.",
    instruction: "Answer the question from these passages.", asks: "Question:",
    find: "find", tokenize: "tokenize", look_up: "look up", load: "load", lay_in: "lay in", early_layers: "early layers",
    selection: "selection", recompute: "compute", first_token: "first token",
  },
  zh: {
    name: "中文",
    lead: "同一个提示回答两次：一次完整预填充，一次融合各段落已存的 KV。",
    from: "段落", fromCollection: "来自文档集", fromPassages: "粘贴在此",
    passages: "段落", hint: "段落之间空一行。每段各存为一个文档。",
    question: "问题", compare: "比较", stop: "停止", example: "示例", tokens: "最多 token 数",
    key: "此服务器需要密钥", useKey: "使用", keyHint: "密钥只留在本页内存中。",
    full: "完整预填充", blend: "融合", toFirst: "到首个 token",
    prompt: "提示", reused: "复用", recomputed: "重算", computed: "新算", hit: "复用", miss: "新算",
    sources: "来源", tiers: "已存的 KV", tier: "层级", chunks: "块", held: "已占", room: "容量",
    storing: "正在存储段落 {0}/{1} …", answering: "{0} …", done: "完成。", stopped: "已停止。",
    sooner: "融合的首个 token 快 {0} 倍。", later: "完整预填充的首个 token 快 {0} 倍。",
    notBlended: "没有融合，原因见下。",
    sameAnswer: "两个回答相同。", otherAnswer: "两个回答不同。",
    noPassages: "请粘贴段落，或使用示例。", notStored: "段落未能存储：",
    cutOff: "服务器提前结束了回答。", noServer: "服务器没有响应。",
    instruction: "请根据以下段落回答问题。", asks: "问题：",
    find: "查找", tokenize: "分词", look_up: "查询", load: "读取", lay_in: "放入", early_layers: "前几层",
    selection: "选取", recompute: "计算", first_token: "首个 token",
  },
};

export const EXAMPLE = [
  [
    "The harbour of Veldora was dug in 1871, when the river had silted up so far that ships of more than forty tons could no longer reach the old quay. Its basin is nine metres deep and closed by two gates of oak, which are opened twice a day, an hour before high water. The engineer was Ida Marchetti, who had built the locks of the northern canal. She lived on the island in the middle of the basin until the work was done, in a house of planks that the town later kept as a museum.",
    "Pilots in Veldora are licensed for three years. A pilot must have served on the tugs for at least five, know the bar by night, and row the basin alone in under twenty minutes. The fee is set by the council each spring and depends on the length of the ship, not on its cargo. Since 1954 the pilots have had their own boat, the Marchetti, which is painted yellow so that it can be seen in fog. It lies at the eastern gate and leaves within a quarter of an hour of a call.",
    "The museum on the island shows the tools with which the basin was dug: iron shovels, a steam crane of four horsepower, and the notebooks of the engineer. It is open from April to October, on all days but Monday. Visitors cross on a chain ferry that is worked by hand, as it was when the house was built. In the last room hangs the first chart of the basin, drawn in ink on sailcloth, with the depths in feet and a note that warns of a wreck near the western gate.",
    "Fog closes the harbour on some thirty days a year, most of them in November. While it lasts a bell on the western gate is struck four times a minute, and no ship may pass the bar without a pilot. The bell was cast from the anchor of the wreck that had lain there since 1866 and was raised when the gates were renewed. Fishermen say that its tone is a little too low, and that this is why it carries so far.",
  ],
  "What colour is the boat that is named after the engineer of the harbour?",
];
